"""The talker's KV cache in pages: the pages of each slot, and the prefixes that they begin with."""

from collections.abc import Mapping

from torch import Tensor

from megakernel_tts.backends.decode_buffers import DecodeBuffers
from megakernel_tts.backends.page_pool import PagePool
from megakernel_tts.kernels.structs import DecodeInfo


class PagedCache:
    """Keys and values of slots that share pages.

    A page keeps its content while it is free. The cache records which prefix a page begins with: a
    stream whose first page begins with its prefix needs no copy of it.
    """

    def __init__(self, buffers: DecodeBuffers, info: DecodeInfo, max_positions: int) -> None:
        """Starts with all pages free.

        Args:
            buffers: Have the keys, the values and the page table.
            info: Facts about the kernels.
            max_positions: Positions of a slot at most.
        """
        self._buffers = buffers
        self._kv_tile_size, self._max_positions = info.kv_tile_size, max_positions
        num_slots, num_columns = buffers.page_table.shape
        self._pool = PagePool(
            len(buffers.keys),
            num_slots,
            page_size=info.page_size,
            slot_pages=-(-max_positions // info.page_size),
            num_columns=num_columns,
        )
        self._num_uploaded_changes = 0  # of the pool's table
        self._prefixes: dict[int, bytes] = {}  # page -> key of the prefix that it begins with

    # --- pages ---

    def reserve(self, slot: int, num_positions: int, *, beginning: bool = False) -> bool:
        """Assigns pages to a slot; see `Backend.reserve`."""
        num_positions = min(num_positions, self._max_positions)
        if num_positions <= self._pool.num_positions(slot):
            return True  # of most frames of many streams
        num_before = len(self._pool.pages(slot))
        if not self._pool.reserve(slot, num_positions, beginning=beginning):
            return False
        for page in self._pool.pages(slot)[max(num_before, 1) :]:
            self._prefixes.pop(page, None)  # other positions will overwrite it
        return True

    def require(self, slot: int, num_positions: int) -> None:
        """Assigns pages to a slot.

        Raises:
            MemoryError: Too few are free.
        """
        if not self.reserve(slot, num_positions):
            raise MemoryError(
                f"The KV cache is full: slot {slot} needs {num_positions} positions and has pages "
                f"for {self._pool.num_positions(slot)}; {self._pool.num_free} of all "
                f"{self._pool.num_pages} pages of {self._pool.page_size} positions are free. "
                "Release a slot, or load with more cache_positions."
            )

    def prepare_frames(self, num_positions: Mapping[int, int], num_frames: int) -> int:
        """Assigns pages for the next frames of slots, and passes their pages to the device.

        Args:
            num_positions: Positions that the stream of each slot has.
            num_frames: Frames that may follow, with a position each.

        Returns:
            The frames for which every slot has pages; at least one.

        Raises:
            MemoryError: There is no page for the next one.
        """
        for slot, count in num_positions.items():
            if not self.reserve(slot, count + num_frames):
                self.require(slot, count + 1)
                num_frames = self._pool.num_positions(slot) - count
        self.upload_table()
        return num_frames

    def release(self, slot: int) -> None:
        """Frees the pages of a slot."""
        self._pool.release(slot)

    def upload_table(self, *, again: bool = False) -> None:
        """Passes the slots' pages to the device, for the launches that follow.

        Args:
            again: Whether to copy them even if the device has them.
        """
        if again or self._pool.num_changes != self._num_uploaded_changes:
            self._buffers.upload_page_table(self._pool.table)
            self._num_uploaded_changes = self._pool.num_changes

    def views(self, slot: int, end: int) -> list[Tensor]:
        """Returns a slot's keys and values before position `end`, in whole KV tiles."""
        keys, values, page_size = self._buffers.keys, self._buffers.values, self._pool.page_size
        found: list[Tensor] = []
        for begin, page in zip(range(0, end, page_size), self._pool.pages(slot), strict=False):
            size = min(end - begin, page_size)
            found.append(keys[page, :, :, :size])
            found.append(values[page, :, :, : -(-size // self._kv_tile_size)])
        return found

    # --- prefixes ---

    def has_prefix(self, slot: int, key: bytes) -> bool:
        """Returns whether a slot, which has pages, begins with the prefix of a key."""
        return self._prefixes.get(self._pool.pages(slot)[0]) == key

    def set_prefix(self, slot: int, key: bytes, num_positions: int) -> None:
        """Records the prefix that a slot begins with. One of several pages is not recorded."""
        if num_positions <= self._pool.page_size:
            self._prefixes[self._pool.pages(slot)[0]] = key

    def drop_prefix(self, slot: int) -> None:
        """Removes the record of a slot's first page, before other positions are written there."""
        self._prefixes.pop(self._pool.pages(slot)[0], None)

    def drop_prefixes(self) -> None:
        """Removes all records of prefixes."""
        self._prefixes.clear()
