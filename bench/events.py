"""Times of what a GPU does."""

from collections.abc import Callable

import torch


def event_times(act: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each run on the GPU, by CUDA events.

    Args:
        act: Launches work on the current stream.
        repeats: How often.
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
