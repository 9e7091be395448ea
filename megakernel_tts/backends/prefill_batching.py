"""Prefill batching: which positions of which prompts pass through the talker together.

A prompt is cut into prompt tiles: the first of `first_size` positions, the following of
`tile_size`. A tile is never split between batches, so that the result does not depend on the other
prompts: positions of one tile attend to each other in float32, and to earlier ones in bfloat16.
Tiles of several prompts share a batch. Several tiles of one prompt share a wide batch.
"""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from typing import NamedTuple

from torch import Tensor

from megakernel_tts.kernels.structs import (
    BATCH_COLUMNS,
    WIDE_BATCH_COLUMNS,
    PrefillBatch,
    WidePrefillBatch,
)


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
class Batch:
    """Prompt tiles that pass through the talker together.

    Attributes:
        tiles: Its tiles; those of one prompt are side by side, in order.
        num_columns: Positions of the tiles.
    """

    tiles: list[PromptPart] = field(default_factory=list[PromptPart])
    num_columns: int = 0

    def add(self, tile: PromptPart) -> None:
        """Adds a tile."""
        self.tiles.append(tile)
        self.num_columns += tile.end - tile.begin

    def record(self, first_row: int) -> list[int]:
        """The values of a `PrefillBatch`.

        Args:
            first_row: Columns of the batches before.
        """
        columns: list[int] = []
        first_column = prompt_end_mask = 0
        for tile in self.tiles:
            for position in range(tile.begin, tile.end):
                columns += (tile.slot, position, first_column)
            first_column += tile.end - tile.begin
            prompt_end_mask |= int(_ends_prompt(tile)) << first_column - 1
        padding = [0] * (3 * BATCH_COLUMNS - len(columns))
        return [self.num_columns, first_row, prompt_end_mask, *columns, *padding]

    def wide_record(self, first_row: int) -> list[int]:
        """The values of a `WidePrefillBatch`.

        Args:
            first_row: Columns of the batches before.
        """
        columns: list[int] = []
        first_column = 0
        for tile, following in zip_longest(self.tiles, self.tiles[1:]):
            precedes_tile = int(following is not None and following.slot == tile.slot)
            for position in range(tile.begin, tile.end):
                columns += (tile.slot, position, first_column, precedes_tile, 0)
            columns[-1] = int(_ends_prompt(tile))
            first_column += tile.end - tile.begin
        padding = [0] * (5 * WIDE_BATCH_COLUMNS - len(columns))
        return [self.num_columns, first_row, *columns, *padding]


def _ends_prompt(tile: PromptPart) -> bool:
    """Whether a tile has the last position of its prompt."""
    return tile.end == tile.prompt.shape[0]


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


def fill_batches(
    parts: Sequence[PromptPart],
    first_size: int,
    tile_size: int,
    max_columns: int,
    *,
    wide: bool = False,
) -> list[Batch]:
    """Puts each tile into the first batch that has columns for it, behind its predecessor's.

    Args:
        parts: Of different slots.
        first_size: Positions of a prompt's first tile.
        tile_size: Positions of each other tile.
        max_columns: Columns of a batch at most.
        wide: The batches are those of wide kernels: a tile may share its predecessor's.
    """
    batches: list[Batch] = []
    earliest: dict[int, int] = {}  # the first batch for the next tile of a slot
    # In rounds: the first tiles of all parts, then the second ones, and so on.
    rounds = zip_longest(*[_tiles(part, first_size, tile_size) for part in parts])
    for tile in filter(None, chain.from_iterable(rounds)):
        i = earliest.get(tile.slot, 0)
        while i < len(batches) and batches[i].num_columns + tile.end - tile.begin > max_columns:
            i += 1
        if i == len(batches):
            batches.append(Batch())
        batches[i].add(tile)
        earliest[tile.slot] = i if wide else i + 1
    if wide:
        for batch in batches:
            batch.tiles.sort(key=lambda tile: tile.slot)  # stable: a slot's tiles stay in order
    return batches


def _first_rows(batches: Sequence[Batch]) -> Iterator[int]:
    """Columns of the batches before each batch."""
    return accumulate((batch.num_columns for batch in batches[:-1]), initial=0)


def pack_batches(batches: Sequence[Batch]) -> "ctypes.Array[PrefillBatch]":
    """Writes batches for the kernels for few streams; `first_row` counts from the first one."""
    # As one array: assigning 80 columns to fields takes 0.1 ms.
    values = array("i")
    for batch, first_row in zip(batches, _first_rows(batches), strict=True):
        values.extend(batch.record(first_row))
    return (PrefillBatch * len(batches)).from_buffer(values)


def pack_wide_batches(batches: Sequence[Batch]) -> "ctypes.Array[WidePrefillBatch]":
    """Writes batches for the wide kernels; `first_row` counts from the first one."""
    values = array("i")
    for batch, first_row in zip(batches, _first_rows(batches), strict=True):
        values.extend(batch.wide_record(first_row))
    return (WidePrefillBatch * len(batches)).from_buffer(values)
