"""Real-time streams of recognition, on a device with fixed times."""

import asyncio

import numpy as np

from bench.microphones import arrivals
from bench.realtime_recognition import run, simulated_stt


def test_real_time_streams_have_results_in_time() -> None:
    with simulated_stt(8, (0.001, 0.0)) as stt:
        figures = asyncio.run(run(stt, 8, 1.5, 0.02, 160))
    assert figures["streams"] == 8
    assert figures["results"] > 20
    assert 0.2 < figures["tokens_per_frame"] < 0.5
    assert 1.0 <= figures["latency_ms"]["p50"] < 100.0


def test_packets_of_a_stream_arrive_in_order_and_at_most_so_late() -> None:
    times = arrivals(50, 2.0, 0.1, np.random.default_rng(0))
    assert times.shape == (50, 100)
    assert (np.diff(times) >= 0).all()
    recorded = 0.02 * np.arange(1, 101)
    late = times - recorded - (times - recorded).min(1, keepdims=True)
    assert 0.05 < late.max() <= 0.1
