"""Processor cores for the clients of a load alone."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager


@contextmanager
def separate_cores(number: int) -> Generator[Sequence[int]]:
    """Keeps this thread, and the processes that it starts, off some cores until the block ends.

    Args:
        number: Of cores. They are half of the available ones at most, or else none.

    Yields:
        The cores; none if there are too few, or the system (such as macOS) cannot assign cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield ()
        return
    cores = sorted(os.sched_getaffinity(0))
    if 2 * number > len(cores):
        yield ()
        return
    os.sched_setaffinity(0, cores[:-number])
    try:
        yield cores[-number:]
    finally:
        os.sched_setaffinity(0, cores)
