"""Chooses the device of a model."""

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
