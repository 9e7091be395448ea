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
LIMIT = 64 << 20


class PrefixCache:
    """Copies of slots' keys and values; the one that was used longest ago leaves first.

    It also knows which slots need no copy, if it is told: what a stream adds comes behind its
    prefix, so that the next one in the same slot may find it in place.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        """Starts empty.

        Args:
            limit: Bytes at most.
        """
        self._limit = limit
        self._kept: OrderedDict[bytes, tuple[Tensor, ...]] = OrderedDict()
        self._bytes = 0
        self._in_place: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> tuple[Tensor, ...] | None:
        """The parts that were put under a key, or None."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

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
        if size > self._limit:
            return copies
        self._kept[key] = copies
        self._bytes += size
        while self._bytes > self._limit:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)
        return copies

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()
        self._bytes = 0
        self._in_place.clear()

    def holds(self, slot: int, key: bytes) -> bool:
        """Whether the parts of a key lie in a slot."""
        return self._in_place.get(slot) == key

    def note(self, slot: int, key: bytes) -> None:
        """Takes note that the parts of a key lie in a slot."""
        self._in_place[slot] = key

    def spoil(self, slot: int) -> None:
        """Takes the note back, before anything else is written there."""
        self._in_place.pop(slot, None)


def _size(parts: Sequence[Tensor]) -> int:
    return sum(part.nbytes for part in parts)
