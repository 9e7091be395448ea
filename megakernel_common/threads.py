"""Starts an engine's thread, and chooses with how many threads torch computes in it on a CPU."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from megakernel_common.checkpoint import leaves

# Of the networks that an engine runs. One thread is faster for the demo models, which have less;
# the released ones have several times as many: docs/design-notes/host-path.md.
_MAX_PARAMETERS = 100_000_000


def suits_one_thread(networks: Any, device: torch.device) -> bool:
    """Whether networks run faster with one thread of torch than with several.

    Their operations are then short, and after each one all threads wait for the slowest.

    Args:
        networks: Dataclasses and tuples of tensors.
        device: Of their work.
    """
    num_parameters = sum(tensor.numel() for tensor in leaves(networks))
    return device.type == "cpu" and num_parameters < _MAX_PARAMETERS


def start_thread(run: Callable[[], None], name: str, *, one_thread: bool) -> threading.Thread:
    """Starts a daemon thread.

    Args:
        run: Its work.
        name: Its name.
        one_thread: Whether torch computes in it without further threads. Other threads keep their
            number.
    """
    if not one_thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread
    is_set = threading.Event()

    def run_in_one_thread() -> None:
        torch.get_num_threads()  # torch's first call in a thread sets the number of the process
        torch.set_num_threads(1)  # of this thread, and of threads without a call so far
        is_set.set()
        run()

    num_threads = torch.get_num_threads()
    thread = threading.Thread(target=run_in_one_thread, name=name, daemon=True)
    thread.start()
    is_set.wait()
    torch.set_num_threads(num_threads)
    return thread
