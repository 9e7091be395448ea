"""Launches of the encoder's kernels, for tensors of one type on one device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernel_common.kernels.addresses import device_address
from megakernel_common.kernels.declarations import DeviceStruct
from megakernel_common.kernels.module import KernelModule, LaunchConfig
from megakernel_stt.kernels.conformer_structs import BLOCK_THREADS, Streams

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # of the types in those of kernels


class ConformerLauncher:
    """Launches kernels.

    Attributes:
        dtype: Of the kernels' numbers.
        device: Of all tensors.
    """

    def __init__(
        self, module: KernelModule, dtype: torch.dtype, device: torch.device, *, overlap: bool
    ) -> None:
        """Prepares it.

        Args:
            module: The kernels.
            dtype: Of their numbers, float32 or bfloat16.
            device: Of all tensors.
            overlap: Whether the GPU can start a kernel while the previous one ends.
        """
        self.dtype, self.device = dtype, device
        self._module, self._overlap = module, overlap

    def launch(
        self,
        kernel: str,
        params: DeviceStruct,
        num_blocks: int,
        writes: Sequence[Tensor],
        shared_bytes: int = 0,
    ) -> None:
        """Launches a kernel.

        Args:
            kernel: Its name without those of program and type.
            params: Its parameters.
            num_blocks: Thread blocks.
            writes: The tensors that it writes.
            shared_bytes: Dynamic shared memory of a thread block.
        """
        config = LaunchConfig(
            num_blocks, BLOCK_THREADS, shared_bytes, overlap_previous=self._overlap
        )
        name = f"conformer_{kernel}_{NAMES[self.dtype]}"
        self._module.launch(name, params, config, writes=writes)

    def address(self, tensor: Tensor, name: str) -> int:
        """The address of a contiguous tensor of the kernels' numbers, with its name in errors."""
        return device_address(tensor, self.dtype, name, self.device)

    def streams(
        self,
        sources: Tensor,
        targets: Tensor,
        lengths: Tensor,
        num_frames: Tensor,
        chunk_size: int,
    ) -> Streams:
        """The streams of the launches of a chunk; the tensors must outlive the launches.

        Args:
            sources: [streams] int64, state slots to read.
            targets: [streams] int64, state slots to write.
            lengths: [streams] int64, mel frames of each stream in all.
            num_frames: [state slots] int64, frames before the chunk.
            chunk_size: Frames.
        """
        named = {"sources": sources, "targets": targets, "lengths": lengths}
        addresses = {
            name: device_address(tensor, torch.int64, name, self.device)
            for name, tensor in (named | {"num_frames": num_frames}).items()
        }
        return Streams(**addresses, chunk_size=chunk_size)
