"""Data-parallel training: processes with a GPU each train the same parameters."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


class DataParallel:
    """The processes of a training, as one of them sees them.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
    """

    def __init__(self, rank: int = 0, size: int = 1, rendezvous: Path | None = None) -> None:
        """Waits for the other processes.

        Args:
            rank: Number of this process, and of its GPU.
            size: Number of processes.
            rendezvous: A file that does not exist yet, by which several processes find each other.
        """
        self.rank, self.size = rank, size
        if size == 1:
            return
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
            backend = "cpu:gloo,cuda:nccl"
        store = dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
            str(rendezvous), size
        )
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    def first(self, value: float) -> float:
        """The first process's value; all processes must call it equally often."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(shared, 0)
        return float(shared)

    def close(self) -> None:
        """Ends the communication; all processes must call it."""
        if self.size > 1:
            dist.destroy_process_group()

    def average(self, gradients: Tensor) -> None:
        """Replaces gradients by their mean over all processes."""
        if self.size > 1:
            dist.all_reduce(gradients)
            gradients /= self.size
