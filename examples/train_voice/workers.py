"""Worker processes: each has some threads of torch and a GPU, and ends with its parent process."""

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait

import torch


def worker_processes(count: int, threads: int) -> ProcessPoolExecutor:
    """Makes a pool of spawned processes: a fork would have neither torch's threads nor CUDA.

    The visible GPUs are the processes' current devices by turns.

    Args:
        count: Number of processes.
        threads: Threads of torch in each.
    """
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, spawn, initializer=_start, initargs=(threads,))


def _start(threads: int) -> None:
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(_index() % torch.cuda.device_count())
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _index() -> int:
    """Number of this process among those that its parent has started, which its name ends with."""
    return int(multiprocessing.current_process().name.rpartition("-")[2])


def _exit_with_parent() -> None:
    """A parent that is terminated does not end its workers, which would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
