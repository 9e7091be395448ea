"""What the talker has made of the beginnings that prompts share: keys and values, kept by content.

A voice's prompts begin alike, whatever is said. Who begins with a prefix that was run before takes
its keys and values from here instead of running it. That is exact to the bit as long as a prefix
and what follows it are passes of their own with the cache and without; the backends see to it.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

# Bytes: on a GPU, some forty voices of a released model (1.4 MB each for eight positions), or a
# dozen with long instructions or transcripts.
MAX_BYTES = 64 << 20


class PrefixCache:
    """Copies of slots' keys and values; the one that was used longest ago leaves first.

    It also knows which slots need no copy, if it is told: what a stream adds comes behind its
    prefix, so that the next one in the same slot may find it in place.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Starts empty.

        Args:
            max_bytes: Bytes at most.
        """
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[Tensor, ...]] = OrderedDict()
        self._bytes = 0
        self._in_place: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> tuple[Tensor, ...] | None:
        """The parts that were put under a key, or None."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: bytes, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies parts, and keeps them unless they alone are beyond the limit.

        Args:
            key: A new one: the vectors that the parts were made from.
            parts: Views of a backend's buffers.

        Returns:
            The copies.
        """
        copies = tuple(part.clone() for part in parts)
        size = _size(copies)
        if size > self._max_bytes:
            return copies
        self._entries[key] = copies
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= _size(oldest)
        return copies

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self._bytes = 0
        self._in_place.clear()

    def is_in_place(self, slot: int, key: bytes) -> bool:
        """Whether the parts of a key lie in a slot."""
        return self._in_place.get(slot) == key

    def mark_in_place(self, slot: int, key: bytes) -> None:
        """Takes note that the parts of a key lie in a slot."""
        self._in_place[slot] = key

    def invalidate(self, slot: int) -> None:
        """Takes the note back, before anything else is written there."""
        self._in_place.pop(slot, None)


def _size(parts: Sequence[Tensor]) -> int:
    return sum(part.nbytes for part in parts)
