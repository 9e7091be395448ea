"""Prefix cache: keys and values of the leading positions that prompts have in common, by content.

All prompts of a voice begin with the same positions. A stream whose prefix was run before copies
its keys and values instead of running it. The result is bit-identical as long as prefix and rest
are separate passes with and without the cache; the backends ensure that.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

# On a GPU about 40 voices of a released model, at 1.4 MB for eight positions, or about a dozen with
# long instructions or transcripts.
MAX_BYTES = 64 << 20


class PrefixCache:
    """Copies of slots' keys and values; the least recently used entry is evicted first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Starts empty.

        Args:
            max_bytes: Bytes at most.
        """
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[Tensor, ...]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> tuple[Tensor, ...] | None:
        """Returns the tensors that were put under a key, or None."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: bytes, views: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies tensors into the cache, unless they exceed its limit alone.

        Args:
            key: A new key: the content of the prefix.
            views: Views of a backend's buffers.

        Returns:
            The copies.
        """
        copies = tuple(view.clone() for view in views)
        size = _num_bytes(copies)
        if size > self._max_bytes:
            return copies
        self._entries[key] = copies
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self._num_bytes -= _num_bytes(evicted)
        return copies

    def clear(self) -> None:
        """Removes all entries."""
        self._entries.clear()
        self._num_bytes = 0


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
