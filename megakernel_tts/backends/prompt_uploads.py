"""Prompts on their way to the kernels: copied to the device, or read from the host's memory."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel_tts.backends.prefill_batching import Batch
from megakernel_tts.kernels.structs import PrefillBatch, WidePrefillBatch

_NUM_BLOCKS = 4  # prefills without a copy between two waits for the device


class UploadedPrompts(NamedTuple):
    """Prompts that the kernels can read.

    Attributes:
        data: The memory: a copy, which must live until the kernels have been launched, or a part of
            `PromptUploads`, which is not written again before `reuse`.
        vectors: Address of the vectors in it.
        batches: Address of the batches in it.
    """

    data: Tensor
    vectors: int
    batches: int


class PromptUploads:
    """Prompts of the next prefills.

    The rest of a short prompt behind a cached prefix is one or two columns. The kernels read them
    from pinned memory, so that the host makes no copy before it launches them. Each thread block
    reads all columns, so more of them are copied.
    """

    def __init__(self, device: torch.device, hidden_size: int, max_read_columns: int) -> None:
        """Allocates the memory that the kernels read.

        Args:
            device: Of the kernels.
            hidden_size: Values of a vector.
            max_read_columns: Columns of a prefill that is not copied.
        """
        self._device = device
        self._row_bytes = hidden_size * torch.bfloat16.itemsize
        self._max_read_columns = max_read_columns
        self._block_bytes = max_read_columns * self._row_bytes + ctypes.sizeof(PrefillBatch)
        self._blocks = [self._allocate(self._block_bytes) for _ in range(_NUM_BLOCKS)]
        self._num_used = 0  # blocks that the device may not have read yet

    def _allocate(self, num_bytes: int) -> Tensor:
        # Pinned, so that kernels can read it, and that the host does not wait for a copy.
        pinned = self._device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def upload(
        self,
        batches: Sequence[Batch],
        packed: "ctypes.Array[PrefillBatch] | ctypes.Array[WidePrefillBatch]",
    ) -> UploadedPrompts:
        """Puts the vectors and the batches of a prefill where its kernels read them, in one piece.

        Args:
            batches: Of prompt tiles, bfloat16 on the host.
            packed: The same batches as the kernels read them.
        """
        num_columns = sum(batch.num_columns for batch in batches)
        vector_bytes, batch_bytes = num_columns * self._row_bytes, ctypes.sizeof(packed)
        num_bytes = vector_bytes + batch_bytes
        fits = num_columns <= self._max_read_columns and num_bytes <= self._block_bytes
        is_read = fits and self._num_used < _NUM_BLOCKS
        if is_read:
            staged = self._blocks[self._num_used]
            self._num_used += 1
        else:
            staged = self._allocate(num_bytes)
        address = staged.data_ptr()
        for tile in (tile for batch in batches for tile in batch.tiles):
            begin = tile.prompt.data_ptr() + tile.begin * self._row_bytes
            tile_bytes = (tile.end - tile.begin) * self._row_bytes
            ctypes.memmove(address, begin, tile_bytes)
            address += tile_bytes
        ctypes.memmove(address, packed, batch_bytes)
        data = staged if is_read else staged.to(self._device, non_blocking=True)
        return UploadedPrompts(data, data.data_ptr(), data.data_ptr() + vector_bytes)

    def reuse(self) -> None:
        """Allows the memory to be written again.

        Only after a wait for a launch behind all prefills so far.
        """
        self._num_used = 0
