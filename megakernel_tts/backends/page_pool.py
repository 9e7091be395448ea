"""The pages of a KV cache: which are free, and which slot has the others.

A page has the keys and values of 128 consecutive positions of one slot, of all layers and heads. A
slot gets pages as its stream grows, in the order of its positions, and frees all of them together.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class PagePool:
    """Assigns pages to slots.

    A free page keeps its content until it is assigned again. First pages, which begin with a
    prompt's prefix, and later pages are therefore taken from opposite ends of the free ones: a slot
    that begins gets the page in which the last freed slot began.

    Attributes:
        num_pages: Pages of all slots together.
        page_size: Positions of a page.
        table: int32 [slots, columns]: each slot's pages, and behind them any page.
        num_changes: Number of times that the table has changed.
    """

    def __init__(
        self, num_pages: int, num_slots: int, *, page_size: int, slot_pages: int, num_columns: int
    ) -> None:
        """Starts with all pages free.

        Args:
            num_pages: Pages of all slots together, at least `slot_pages`.
            num_slots: Slots.
            page_size: Positions of a page.
            slot_pages: Pages of one slot at most.
            num_columns: Columns of the table, at least `slot_pages`.
        """
        self.num_pages, self.page_size = num_pages, page_size
        self.table: NDArray[np.int32] = np.zeros((num_slots, num_columns), np.int32)
        # The table as lists: reading a row of an array takes several operations of NumPy.
        self._rows: list[list[int]] = self.table.tolist()
        self._slot_pages = slot_pages
        self.num_changes = 0
        self._free = deque(range(num_pages))
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._num_growing = 0  # slots with some of their pages

    @property
    def num_free(self) -> int:
        """Pages that no slot has."""
        return len(self._free)

    def pages(self, slot: int) -> Sequence[int]:
        """Returns a slot's pages, in the order of their positions."""
        return self._pages[slot]

    def num_positions(self, slot: int) -> int:
        """Returns the positions for which a slot has pages."""
        return len(self._pages[slot]) * self.page_size

    def reserve(self, slot: int, num_positions: int, *, beginning: bool = False) -> bool:
        """Assigns the pages that a slot lacks for its first positions, all of them or none.

        Args:
            slot: The slot.
            num_positions: Positions that it must have.
            beginning: Whether a page must stay free for each other slot that has some and may need
                more.

        Returns:
            Whether the slot has the positions.
        """
        pages = self._pages[slot]
        num_missing = -(-num_positions // self.page_size) - len(pages)
        if num_missing <= 0:
            return True
        was_growing = self._is_growing(pages)
        num_spare = self._num_growing - was_growing if beginning else 0
        if num_missing + num_spare > len(self._free):
            return False
        for _ in range(num_missing):
            pages.append(self._free.popleft() if pages else self._free.pop())
        self._num_growing += self._is_growing(pages) - was_growing
        self._write(slot)
        return True

    def release(self, slot: int) -> None:
        """Frees the pages of a slot."""
        pages = self._pages[slot]
        if not pages:
            return
        self._num_growing -= self._is_growing(pages)
        self._free.append(pages[0])
        self._free.extendleft(pages[1:])
        pages.clear()

    def _is_growing(self, pages: Sequence[int]) -> bool:
        """Whether a slot with these pages has some and may need more."""
        return 0 < len(pages) < self._slot_pages

    def _write(self, slot: int) -> None:
        """Writes a slot's row of the table, unless its last stream left the same pages there."""
        pages, row = self._pages[slot], self._rows[slot]
        if row[: len(pages)] != pages:
            row[: len(pages)] = pages
            self.table[slot, : len(pages)] = pages
            self.num_changes += 1
