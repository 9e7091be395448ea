"""Prefill batching: which positions of which prompts pass through the talker together.

A prompt is cut into tiles: the first of `first_size` positions, the following of `tile_size`. A
tile is never split between batches, so that the result does not depend on the other prompts:
positions of one batch attend to each other in float32, and to earlier ones in bfloat16. Tiles of
several prompts share a batch.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megakernel_tts.kernels.structs import PrefillBatch

_BATCH: np.dtype[Any] = np.dtype(PrefillBatch)


class PrefillSegment(NamedTuple):
    """Positions of a prompt that are to be run.

    Attributes:
        slot: The stream's slot.
        prompt: The whole prompt [positions, hidden].
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
        vectors: Input vectors [positions of a tile, hidden] of each tile.
        columns: Slot, position, and the tile's first column, of each column.
        prompt_end_mask: Bit c is set if column c is the last position of its prompt.
    """

    vectors: list[Tensor] = field(default_factory=list[Tensor])
    columns: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    prompt_end_mask: int = 0

    def add(self, segment: PrefillSegment, tile: range) -> None:
        """Adds a tile of a segment."""
        first_column = len(self.columns)
        self.vectors.append(segment.prompt[tile.start : tile.stop])
        self.columns += [(segment.slot, position, first_column) for position in tile]
        if tile.stop == len(segment.prompt):
            self.prompt_end_mask |= 1 << len(self.columns) - 1


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


def _tiles(segment: PrefillSegment, first_size: int, tile_size: int) -> Iterator[range]:
    begin = segment.begin
    while begin < segment.end:
        end = begin + (tile_size if begin else first_size)
        yield range(begin, min(end, segment.end))
        begin = end


def pack_batches(
    segments: Sequence[PrefillSegment], first_size: int, tile_size: int
) -> tuple[list[Tensor], "ctypes.Array[PrefillBatch]"]:
    """Packs segments into batches: each tile into the first batch behind its predecessor's.

    Args:
        segments: Of different slots.
        first_size: Positions of a prompt's first tile.
        tile_size: Positions of each other tile, and columns of a batch at most.

    Returns:
        The input vectors of the tiles in the order of their columns, each [positions, hidden], and
        the batches.
    """
    batches: list[_BatchBuilder] = []
    earliest = dict.fromkeys((segment.slot for segment in segments), 0)
    # In rounds: the first tiles of all segments, then the second ones, and so on.
    rounds = zip_longest(
        *([(s, tile) for tile in _tiles(s, first_size, tile_size)] for s in segments)
    )
    for segment, tile in filter(None, chain.from_iterable(rounds)):
        i = earliest[segment.slot]
        while i < len(batches) and len(batches[i].columns) + len(tile) > tile_size:
            i += 1
        if i == len(batches):
            batches.append(_BatchBuilder())
        batches[i].add(segment, tile)
        earliest[segment.slot] = i + 1
    packed = (PrefillBatch * len(batches))()
    first_row = 0
    # Through NumPy: assigning 80 columns to ctypes fields takes 0.1 ms.
    columns = np.frombuffer(memoryview(packed), _BATCH)["columns"]
    for record, record_columns, batch in zip(packed, columns, batches, strict=True):
        num_columns = len(batch.columns)
        record.num_columns, record.first_row = num_columns, first_row
        record.prompt_end_mask = batch.prompt_end_mask
        record_columns[:num_columns] = batch.columns
        first_row += num_columns
    return [tile for batch in batches for tile in batch.vectors], packed
