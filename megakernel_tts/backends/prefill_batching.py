"""Prefill batching: which positions of which prompts pass through the talker together.

A prompt is cut into prompt tiles: the first of `first_size` positions, the following of
`tile_size`. A tile is never split between batches, so that the result does not depend on the other
prompts: positions of one tile attend to each other in float32, and to earlier ones in bfloat16.
Tiles of several prompts share a batch. Several tiles of one prompt share a wide batch.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.kernels.structs import PrefillBatch, WidePrefillBatch

_BATCH: np.dtype[Any] = np.dtype(PrefillBatch)
_WIDE_BATCH: np.dtype[Any] = np.dtype(WidePrefillBatch)


class PromptRange(NamedTuple):
    """Positions of a prompt: a prefill chunk, or one tile of it.

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

    tiles: list[PromptRange] = field(default_factory=list[PromptRange])
    num_columns: int = 0

    def add(self, tile: PromptRange) -> None:
        """Adds a tile."""
        self.tiles.append(tile)
        self.num_columns += tile.end - tile.begin

    def write(self, record: np.void, first_row: int) -> list[NDArray[Any]]:
        """Writes what a `PrefillBatch` and a `WidePrefillBatch` have in common.

        Args:
            record: All fields are 0.
            first_row: Columns of the batches before.

        Returns:
            The columns of each tile in the record, for what the two kinds do not have in common.
        """
        record["num_columns"], record["first_row"] = self.num_columns, first_row
        columns_of_tiles: list[NDArray[Any]] = []
        first_column = 0
        for tile in self.tiles:
            end = first_column + tile.end - tile.begin
            columns = record["columns"][first_column:end]
            columns["slot"], columns["first_column"] = tile.slot, first_column
            columns["position"] = np.arange(tile.begin, tile.end)
            columns_of_tiles.append(columns)
            first_column = end
        return columns_of_tiles


def _ends_prompt(tile: PromptRange) -> bool:
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


def chunk_end(begin: int, end: int, budget: int, first_size: int, tile_size: int) -> int:
    """Returns where a prefill chunk may end: behind as many tiles as the budget has, or one.

    Args:
        begin: First position of the chunk; the first of a tile.
        end: Position after the last one that may be run.
        budget: Positions of the chunk at most, if that is a tile or more.
        first_size: Positions of the first tile.
        tile_size: Positions of each other tile.
    """
    if begin + budget >= end:
        return end
    first_end = begin + (tile_size if begin else first_size)
    return min(end, first_end + max(0, begin + budget - first_end) // tile_size * tile_size)


def _tiles(chunk: PromptRange, first_size: int, tile_size: int) -> Iterator[PromptRange]:
    slot, prompt, begin, last = chunk
    while begin < last:
        end = begin + (tile_size if begin else first_size)
        yield PromptRange(slot, prompt, begin, min(end, last))
        begin = end


def fill_batches(
    chunks: Sequence[PromptRange],
    first_size: int,
    tile_size: int,
    max_columns: int,
    *,
    wide: bool = False,
) -> list[Batch]:
    """Puts each tile into the first batch that has columns for it, behind its predecessor's.

    Args:
        chunks: Of different slots.
        first_size: Positions of a prompt's first tile.
        tile_size: Positions of each other tile.
        max_columns: Columns of a batch at most.
        wide: The batches are those of wide kernels: a tile may share its predecessor's.
    """
    batches: list[Batch] = []
    earliest: dict[int, int] = {}  # the first batch for the next tile of a slot
    # In rounds: the first tiles of all chunks, then the second ones, and so on.
    rounds = zip_longest(*[_tiles(chunk, first_size, tile_size) for chunk in chunks])
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
    packed = (PrefillBatch * len(batches))()
    records = np.frombuffer(memoryview(packed), _BATCH)
    for record, batch, first_row in zip(records, batches, _first_rows(batches), strict=True):
        ends = accumulate(len(columns) for columns in batch.write(record, first_row))
        record["prompt_end_mask"] = sum(
            1 << end - 1 for tile, end in zip(batch.tiles, ends, strict=True) if _ends_prompt(tile)
        )
    return packed


def pack_wide_batches(batches: Sequence[Batch]) -> "ctypes.Array[WidePrefillBatch]":
    """Writes batches for the wide kernels; `first_row` counts from the first one."""
    packed = (WidePrefillBatch * len(batches))()
    records = np.frombuffer(memoryview(packed), _WIDE_BATCH)
    for record, batch, first_row in zip(records, batches, _first_rows(batches), strict=True):
        tiles, columns_of_tiles = batch.tiles, batch.write(record, first_row)
        for tile, following, columns in zip_longest(tiles, tiles[1:], columns_of_tiles):
            columns["precedes_tile"] = following is not None and following.slot == tile.slot
            columns["ends_prompt"][-1] = _ends_prompt(tile)
    return packed
