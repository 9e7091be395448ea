"""Worker processes: each has some threads of torch and a GPU, and ends with its parent process."""

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.sharedctypes import Synchronized

import torch


def worker_processes(count: int, threads: int) -> ProcessPoolExecutor:
    """Makes a pool of spawned processes: a fork would have neither torch's threads nor CUDA.

    The visible GPUs are the processes' current devices by turns.

    Args:
        count: Number of processes.
        threads: Threads of torch in each.
    """
    spawn = multiprocessing.get_context("spawn")
    started = spawn.Value("i", 0)
    return ProcessPoolExecutor(count, spawn, initializer=_start, initargs=(threads, started))


def _start(threads: int, started: "Synchronized[int]") -> None:
    torch.set_num_threads(threads)
    with started.get_lock():
        index, started.value = started.value, started.value + 1
    if torch.cuda.is_available():
        torch.cuda.set_device(index % torch.cuda.device_count())
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A parent that is terminated does not end its workers, which would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
