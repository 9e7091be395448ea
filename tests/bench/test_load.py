import pytest

from bench import load
from bench.load import LoadClients, summarise
from bench.load_client import LoadRecord, Outcome, StreamRecord


def stream(
    arrival_s: float,
    first_s: float | None,
    end_s: float,
    *gaps_s: float,
    outcome: Outcome = Outcome.COMPLETE,
    delay_s: float = 0.0,
) -> StreamRecord:
    audio_s = 0.0 if first_s is None else 4.0
    return StreamRecord(arrival_s, delay_s, end_s, outcome, first_s, audio_s, gaps_s)


def test_the_figures_are_those_of_all_processes() -> None:
    one = LoadRecord((stream(0.0, 0.01, 2.0), stream(1.0, 0.03, 1.5)), 1.0)
    late = stream(1.1, 0.02, 8.8, 0.1, 0.3, delay_s=0.1)
    other = LoadRecord((late, stream(5.0, None, 0.5)), 0.5)
    figures = summarise(0.5, 8.0, [one, other])
    assert (figures.requests, figures.complete, figures.max_concurrent) == (4, 4, 3)
    # Divided by the 10 s until the last request ended.
    assert (figures.served_per_second, figures.audio_seconds_per_second) == (0.4, 1.2)
    assert (figures.first_audio_ms_p50, figures.first_audio_ms_p95) == (20.0, 29.0)
    assert (figures.underruns, figures.streams_with_underruns) == (2, 1)
    assert figures.longest_gap_ms == 300.0
    assert (figures.client_delay_ms_p50, figures.client_delay_ms_p99) == (0.0, 97.0)
    assert figures.client_cores == (0.1, 0.05)


@pytest.mark.parametrize(
    ("streams", "holds"),
    [
        ([stream(0, 0.05, 1)] * 10, True),
        ([stream(0, 0.05, 1)] * 9 + [stream(0, 0.05, 1, 0.01)], True),  # a tenth is allowed
        ([stream(0, 0.05, 1)] * 8 + [stream(0, 0.05, 1, 0.01)] * 2, False),
        ([stream(0, 0.05, 1)] * 8 + [stream(0, 0.11, 1)] * 2, False),  # the 95th percentile
        ([stream(0, 0.05, 1)] * 9 + [stream(0, None, 1, outcome=Outcome.REFUSED)], False),
        ([stream(0, 0.05, 1)] * 9 + [stream(0, 0.05, 1, outcome=Outcome.FAILED)], False),
        ([stream(0, 0.05, 1)] * 9 + [stream(0, 0.05, 1, delay_s=0.2)], False),  # sent too late
        ([], False),
    ],
)
def test_a_rate_holds_if_all_requests_are_served_in_time(
    streams: list[StreamRecord], holds: bool
) -> None:
    figures = summarise(10.0, 1.0, [LoadRecord((*streams,), 0.0)])
    assert figures.holds(100.0, 0.1) is holds


def test_a_client_process_that_has_ended_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_CLIENT", ("sh", "-c", "echo ready; exit 3"))
    with (
        LoadClients.start(1) as clients,
        pytest.raises(RuntimeError, match="ended with status 3"),
    ):
        clients.records()
