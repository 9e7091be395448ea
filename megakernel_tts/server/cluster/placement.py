"""Which engine processes there are, and on which GPU each one runs."""

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Gpus = tuple[int, ...] | Literal["all"]


@dataclass(frozen=True)
class Placement:
    """Where an engine process runs.

    Attributes:
        name: Of its GPU, for logs and metrics.
        device: The device that it loads the model on.
        environment: Variables of the process in addition to those of the front.
    """

    name: str
    device: str
    environment: Mapping[str, str]


def parse_gpus(option: str) -> Gpus:
    """Parses `all`, or indices such as `0,1`.

    Raises:
        ValueError: It is neither.
    """
    if option == "all":
        return "all"
    names = [name.strip() for name in option.split(",")]
    if not all(name.isdecimal() for name in names):
        raise ValueError(f"{option!r} must be all, or the numbers of GPUs, such as 0,1.")
    indices = tuple(int(name) for name in names)
    if len(set(indices)) < len(indices):
        raise ValueError(f"{option!r} names a GPU twice; one engine runs on each.")
    return indices


def place_engines(gpus: Gpus, environment: Mapping[str, str]) -> list[Placement]:
    """Places one engine on each GPU. Without any GPU, as many engines run on the CPU.

    An engine on a GPU uses one thread for operations of the host, unless `OMP_NUM_THREADS` names
    another number: its tensors there are small, and threads that sleep wake up late. On the CPU the
    engines share the processors.

    Args:
        gpus: Indices as CUDA counts the GPUs that this process may use, or `all`.
        environment: The environment of this process.

    Raises:
        ValueError: There is no such GPU.
    """
    num_gpus = count_gpus()
    if not num_gpus:
        num_engines = 1 if gpus == "all" else len(gpus)
        num_threads = max(1, (os.cpu_count() or 1) // num_engines)
        threads = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(num_threads))}
        return [Placement(f"cpu:{i}", "cpu", threads) for i in range(num_engines)]
    indices = range(num_gpus) if gpus == "all" else gpus
    if missing := [i for i in indices if i >= num_gpus]:
        raise ValueError(f"There is no GPU {missing[0]}; this process may use {num_gpus}.")
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(num_gpus)]
    threads = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")}
    return [
        Placement(f"cuda:{i}", "cuda", threads | {"CUDA_VISIBLE_DEVICES": names[i].strip()})
        for i in indices
    ]


def count_gpus() -> int:
    """Returns how many GPUs CUDA lets this process use; 0 without CUDA's driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
