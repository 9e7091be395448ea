from megakernel_tts.server.metrics import Counter, Histogram, Metrics


def test_a_bucket_counts_the_values_up_to_its_bound() -> None:
    histogram = Histogram("x", "X.", (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    assert list(histogram.lines('model_name="m"')) == [
        "# HELP megakernel_tts:x X.",
        "# TYPE megakernel_tts:x histogram",
        'megakernel_tts:x_bucket{model_name="m",le="0.1"} 2',
        'megakernel_tts:x_bucket{model_name="m",le="1"} 4',
        'megakernel_tts:x_bucket{model_name="m",le="+Inf"} 5',
        'megakernel_tts:x_sum{model_name="m"} 8.65',
        'megakernel_tts:x_count{model_name="m"} 5',
    ]


def test_a_counter_has_a_line_for_each_value_of_its_label() -> None:
    counter = Counter("x", "X.", "reason")
    for reason in ("a", "b", "a"):
        counter.add(reason)
    assert [*counter.lines('model_name="m"')][2:] == [
        'megakernel_tts:x{model_name="m",reason="a"} 2',
        'megakernel_tts:x{model_name="m",reason="b"} 1',
    ]


def test_gauges_are_read_with_the_metrics_and_labels_are_escaped() -> None:
    metrics, values = Metrics('a"b\\c\nd'), iter([1.0, 2.5])
    metrics.add_gauge("x", "X.", lambda: next(values))
    assert 'megakernel_tts:x{model_name="a\\"b\\\\c\\nd"} 1\n' in metrics.text()
    assert 'megakernel_tts:x{model_name="a\\"b\\\\c\\nd"} 2.5\n' in metrics.text()
