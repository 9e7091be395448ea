from collections.abc import Iterator
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from bench import playback_gaps
from bench.playback_gaps import Turn, busy_processes, run_turn
from megakernel_tts import TTS, Sampling


class LateTTS:
    """An engine whose chunks of 100 ms come at given times, in seconds."""

    sampling = Sampling()

    def __init__(self, times_s: list[float]) -> None:
        self.now_s = 0.0
        self._times_s = times_s

    def stream(self, text: str, **arguments: Any) -> Iterator[SimpleNamespace]:
        for now_s in self._times_s:
            self.now_s = now_s
            yield SimpleNamespace(pcm=np.zeros(2_400, np.int16), sample_rate=24_000)


def played(times_s: list[float], monkeypatch: pytest.MonkeyPatch) -> Turn:
    tts = LateTTS(times_s)
    monkeypatch.setattr(playback_gaps, "perf_counter", lambda: tts.now_s)
    return run_turn(cast(TTS, tts), "Hello.", seed=1)


def test_late_chunks_are_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audio of the first two chunks ends at 0.25 s, that of the third at 0.38 s."""
    turn = played([0.05, 0.1, 0.28, 0.4], monkeypatch)
    assert turn == Turn(50.0, 1.0, 0.4, (30.0, 20.0))


def test_a_turn_fails_by_a_gap_of_an_engine_that_is_fast_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert played([0.01, 0.12, 0.13, 0.14], monkeypatch).fails
    assert not played([0.01, 0.1, 0.2, 0.3], monkeypatch).fails  # no gap
    assert not played([0.01, 0.12, 0.24, 0.36], monkeypatch).fails  # too slow for no gap


def test_busy_processes_compute_for_their_shares_and_end() -> None:
    with busy_processes(1.5) as processes:
        _, half = (psutil.Process(process.pid) for process in processes)
        before, start_s = half.cpu_times().user, perf_counter()
        while (computed_s := half.cpu_times().user - before) < 0.3:
            sleep(0.01)
        assert computed_s < 0.7 * (perf_counter() - start_s)
    assert all(process.returncode is not None for process in processes)
