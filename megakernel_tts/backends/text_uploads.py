"""Text vectors on their way to the device: those of all streams are one copy."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class TextUploads:
    """Text vectors that were fed since the last launch.

    A copy for each stream takes several calls of the driver, and 64 streams that begin together
    need one each.
    """

    def __init__(self, text: Tensor, upload: Callable[[Tensor], Tensor]) -> None:
        """Has no vectors.

        Args:
            text: [slots, positions, hidden], the memory of the device that receives them.
            upload: Copies a tensor to the device without waiting.
        """
        self._text, self._upload = text, upload
        self._pending: dict[int, list[tuple[int, Tensor]]] = {}  # by slot

    def add(self, slot: int, begin: int, vectors: Tensor) -> None:
        """Adds vectors behind those that a slot has.

        Args:
            slot: The slot.
            begin: How many it has.
            vectors: [tokens, hidden] on the host, of the text's dtype; not changed before `flush`.

        Raises:
            ValueError: They are others, which would fail together with those of other streams.
        """
        dtype, hidden_size = self._text.dtype, self._text.shape[-1]
        if vectors.shape[1:] != (hidden_size,) or vectors.dtype != dtype or not vectors.is_cpu:
            raise ValueError(
                f"Text vectors must be [tokens, {hidden_size}] of type {dtype} on the host, found "
                f"{[*vectors.shape]} of type {vectors.dtype} on {vectors.device}."
            )
        self._pending.setdefault(slot, []).append((begin, vectors))

    def drop(self, slot: int) -> None:
        """Drops the vectors of a slot."""
        self._pending.pop(slot, None)

    def flush(self) -> None:
        """Copies the vectors to the device, behind the launches before. Called in inference mode.

        The host does not wait.
        """
        if not self._pending:
            return
        num_positions = self._text.shape[1]
        rows = [
            np.arange(begin, begin + vectors.shape[0]) + slot * num_positions
            for slot, fed in self._pending.items()
            for begin, vectors in fed
        ]
        fed = [vectors for fed in self._pending.values() for _, vectors in fed]
        vectors = self._upload(torch.cat(fed))
        index = self._upload(torch.from_numpy(np.concatenate(rows)))
        self._text.flatten(0, 1).index_copy_(0, index, vectors)
        self._pending.clear()
