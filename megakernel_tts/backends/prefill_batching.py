"""Prefill batching: which positions of which prompts pass through the talker together.

A prompt is cut into tiles: the first of `first_size` positions, the following of `tile_size`. A
tile is never split between batches, so that the result does not depend on the other prompts:
positions of one batch attend to each other in float32, and to earlier ones in bfloat16. Tiles of
several prompts share a batch.
"""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple

from torch import Tensor

from megakernel_tts.kernels.structs import BATCH_COLUMNS, PrefillBatch

_COLUMN_FIELDS = 3  # ints of a `PrefillColumn`


class PromptPart(NamedTuple):
    """Positions of a prompt that are to be run, or one tile of them.

    Attributes:
        slot: The stream's slot.
        prompt: The whole prompt [positions, hidden], contiguous.
        begin: First position; the first of a tile.
        end: The position after the last.
    """

    slot: int
    prompt: Tensor
    begin: int
    end: int


@dataclass
class _BatchBuilder:
    """A batch being filled.

    Attributes:
        tiles: Its tiles.
        num_columns: Positions of the tiles.
        columns: Slot, position, and the tile's first column, of each column.
        prompt_end_mask: Bit c is set if column c is the last position of its prompt.
    """

    tiles: list[PromptPart] = field(default_factory=list[PromptPart])
    num_columns: int = 0
    columns: list[int] = field(default_factory=list[int])
    prompt_end_mask: int = 0

    def add(self, tile: PromptPart) -> None:
        """Adds a tile."""
        first_column = self.num_columns
        self.tiles.append(tile)
        for position in range(tile.begin, tile.end):
            self.columns += (tile.slot, position, first_column)
        self.num_columns += tile.end - tile.begin
        if tile.end == tile.prompt.shape[0]:
            self.prompt_end_mask |= 1 << self.num_columns - 1

    def record(self, first_row: int) -> list[int]:
        """The values of a `PrefillBatch`.

        Args:
            first_row: Columns of the batches before.
        """
        padding = [0] * (_COLUMN_FIELDS * BATCH_COLUMNS - len(self.columns))
        return [self.num_columns, first_row, self.prompt_end_mask, *self.columns, *padding]


def num_tiled_positions(num_positions: int, first_size: int, tile_size: int) -> int:
    """Returns how many of the leading positions form whole tiles.

    Args:
        num_positions: Leading positions of a prompt.
        first_size: Positions of the first tile.
        tile_size: Positions of each other tile.
    """
    if num_positions < first_size:
        return 0
    return first_size + (num_positions - first_size) // tile_size * tile_size


def part_end(begin: int, end: int, budget: int, first_size: int, tile_size: int) -> int:
    """Returns where a part of a prompt may end: behind as many tiles as the budget has, or one.

    Args:
        begin: First position of the part; the first of a tile.
        end: Position after the last one that may be run.
        budget: Positions of the part at most, if that is a tile or more.
        first_size: Positions of the first tile.
        tile_size: Positions of each other tile.
    """
    if begin + budget >= end:
        return end
    first_end = begin + (tile_size if begin else first_size)
    return min(end, first_end + max(0, begin + budget - first_end) // tile_size * tile_size)


def _tiles(part: PromptPart, first_size: int, tile_size: int) -> Iterator[PromptPart]:
    slot, prompt, begin, last = part
    while begin < last:
        end = begin + (tile_size if begin else first_size)
        yield PromptPart(slot, prompt, begin, min(end, last))
        begin = end


def pack_batches(
    parts: Sequence[PromptPart], first_size: int, tile_size: int
) -> tuple[list[PromptPart], "ctypes.Array[PrefillBatch]"]:
    """Packs parts into batches: each tile into the first batch behind its predecessor's.

    Args:
        parts: Of different slots.
        first_size: Positions of a prompt's first tile.
        tile_size: Positions of each other tile, and columns of a batch at most.

    Returns:
        The tiles in the order of their columns, and the batches.
    """
    batches: list[_BatchBuilder] = []
    earliest: dict[int, int] = {}  # the first batch for the next tile of a slot
    # In rounds: the first tiles of all parts, then the second ones, and so on.
    rounds = zip_longest(*[_tiles(part, first_size, tile_size) for part in parts])
    for tile in filter(None, chain.from_iterable(rounds)):
        i = earliest.get(tile.slot, 0)
        while i < len(batches) and batches[i].num_columns + tile.end - tile.begin > tile_size:
            i += 1
        if i == len(batches):
            batches.append(_BatchBuilder())
        batches[i].add(tile)
        earliest[tile.slot] = i + 1
    # As one array: assigning 80 columns to fields takes 0.1 ms.
    values, first_row = array("i"), 0
    for batch in batches:
        values.extend(batch.record(first_row))
        first_row += batch.num_columns
    packed = (PrefillBatch * len(batches)).from_buffer(values)
    return [tile for batch in batches for tile in batch.tiles], packed
