"""Chooses the device of a model, and waits for its work."""

import torch


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


class CompletionEvent:
    """The end of a GPU's work, for which the host spins or sleeps.

    A thread that spins uses a core. One that sleeps hardly uses any, and wakes up 0.1 to 0.3 ms
    late (bench/wait.py). Other threads may run Python in both cases.
    """

    def __init__(self) -> None:
        """Both kinds of CUDA event exist, since the kind of one cannot be changed."""
        self._spinning = torch.cuda.Event()
        self._sleeping = torch.cuda.Event(blocking=True)
        self._recorded = self._spinning

    def record(self, stream: torch.cuda.Stream, *, sleeping: bool) -> None:
        """Marks the end of the work launched so far.

        Args:
            stream: On which it was launched.
            sleeping: Whether the host will sleep until then.
        """
        self._recorded = self._sleeping if sleeping else self._spinning
        self._recorded.record(stream)

    def query(self) -> bool:
        """Whether the work is done."""
        return self._recorded.query()

    def synchronize(self) -> None:
        """Waits until the work is done."""
        self._recorded.synchronize()

    def delay(self, stream: torch.cuda.Stream) -> None:
        """Orders later work of a stream after the work."""
        stream.wait_event(self._recorded)
