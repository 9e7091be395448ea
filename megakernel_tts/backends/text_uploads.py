"""Text vectors on their way to the device: those of all streams are one copy."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class TextUploads:
    """Text vectors that were fed since the last launch.

    A copy by stream takes the host 50 us, and 64 streams that begin together need one each.
    """

    def __init__(self, text: Tensor, upload: Callable[[Tensor], Tensor]) -> None:
        """Has no vectors.

        Args:
            text: [slots, positions, hidden], the memory of the device that receives them.
            upload: Copies a tensor to the device without waiting.
        """
        self._text, self._upload = text, upload
        self._pending: list[tuple[int, int, Tensor]] = []

    def add(self, slot: int, begin: int, vectors: Tensor) -> None:
        """Adds vectors behind those that a slot has.

        Args:
            slot: The slot.
            begin: How many it has.
            vectors: [tokens, hidden], on the host; they must not change before `flush`.
        """
        self._pending.append((slot, begin, vectors))

    def drop(self, slot: int) -> None:
        """Drops the vectors of a slot."""
        self._pending = [each for each in self._pending if each[0] != slot]

    def flush(self) -> None:
        """Copies the vectors to the device, behind the launches before. Called in inference mode.

        The host does not wait.
        """
        if not self._pending:
            return
        num_positions = self._text.shape[1]
        rows = [
            np.arange(begin, begin + vectors.shape[0]) + slot * num_positions
            for slot, begin, vectors in self._pending
        ]
        vectors = self._upload(torch.cat([vectors for _, _, vectors in self._pending]))
        index = self._upload(torch.from_numpy(np.concatenate(rows)))
        self._text.flatten(0, 1).index_copy_(0, index, vectors)
        self._pending.clear()
