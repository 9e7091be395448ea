"""Durations of GPU work by CUDA events."""

from collections.abc import Callable

import torch


def event_times(act: Callable[[], object], repeats: int) -> list[float]:
    """Runs work repeatedly and returns the milliseconds of each run on the GPU.

    Args:
        act: Launches work on the current stream.
        repeats: Number of runs.
    """
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        act()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times
