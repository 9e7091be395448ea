"""Starts an engine's thread, and chooses with how many threads torch computes in it on a CPU."""

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from megakernel_common.checkpoint import leaves

# Operations of small networks are short, and after each one all threads wait for the slowest. With
# one thread per core, one is late because another thread of the process needs its core, and many
# threads are slower than four (docs/design-notes/host-path.md). The released models are larger.
_SMALL_PARAMETERS = 100_000_000
_SMALL_THREADS = 4


def compute_threads(networks: Any, device: torch.device) -> int | None:
    """The number of threads with which torch should compute networks in an engine's thread.

    Args:
        networks: Dataclasses and tuples of tensors.
        device: Of their work.

    Returns:
        None for the number that torch has in this thread.
    """
    num_parameters = sum(tensor.numel() for tensor in leaves(networks))
    if device.type != "cpu" or num_parameters >= _SMALL_PARAMETERS:
        return None
    return min(torch.get_num_threads(), _SMALL_THREADS, max(_num_cores() - 1, 1))


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_thread(
    run: Callable[[], None], name: str, *, num_compute_threads: int | None
) -> threading.Thread:
    """Starts a daemon thread.

    Args:
        run: Its work.
        name: Its name.
        num_compute_threads: With how many threads torch computes in it; None for as many as
            elsewhere. Other threads keep their number.
    """
    if num_compute_threads is None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread
    of_process = queue.SimpleQueue[int]()

    def run_with_compute_threads() -> None:
        # The first call in a thread gives the thread the process's number, so it precedes.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(num_compute_threads)  # of this thread and of the process
        of_process.put(num_threads)
        run()

    thread = threading.Thread(target=run_with_compute_threads, name=name, daemon=True)
    thread.start()
    # On a thread of its own: this one may have a number that is not the process's.
    restore = threading.Thread(target=torch.set_num_threads, args=[of_process.get()])
    restore.start()
    restore.join()
    return thread
