"""Chooses the device of a model, and waits for its work."""

import time

import torch

_POLL_INTERVAL_S = 5e-5  # Linux adds 50 us to each sleep


def pick_device(device: str) -> torch.device:
    """`auto` is the GPU where torch sees one, else the CPU.

    Raises:
        ValueError: No such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}; choose auto, cpu, cuda or cuda:N.") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; choose auto, cpu, cuda or cuda:N.")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but this torch sees no GPU; try `doctor`.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}, but there are {torch.cuda.device_count()} GPUs.")
    return chosen


def wait_for_event(event: torch.cuda.Event, *, spinning: bool) -> None:
    """Waits until a GPU has passed an event; other threads may run Python meanwhile.

    Args:
        event: Was recorded.
        spinning: Whether the thread uses a core and returns at once. Otherwise it polls, which
            takes about a tenth of a core and is up to 0.1 ms late. (A thread that sleeps on a CUDA
            event is 0.1 to 0.3 ms late: bench/wait.py.)
    """
    if not spinning:
        while not event.query():
            time.sleep(_POLL_INTERVAL_S)
    event.synchronize()
