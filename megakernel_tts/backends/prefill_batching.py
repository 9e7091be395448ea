"""Which positions of which prompts go through the talker's kernel together, as columns of a pass.

A prompt's positions go in whole blocks, always the same ones: positions of one pass see each other
in float32, those of earlier passes in bfloat16, so that another grouping would round otherwise.
Blocks of other prompts beside them change nothing.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel_tts.kernels.structs import PrefillBatch


class PrefillSegment(NamedTuple):
    """Positions `begin` to `end` of a prompt; `begin` is that of a block.

    Attributes:
        slot: Where they go.
        prompt: [positions, hidden], all of it.
        begin: The first one.
        end: The one after the last.
    """

    slot: int
    prompt: Tensor
    begin: int
    end: int


@dataclass
class _Pass:
    rows: list[Tensor] = field(default_factory=list[Tensor])
    places: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    ends: int = 0

    def take(self, part: PrefillSegment, block: range) -> None:
        """Adds a block of a part."""
        first = len(self.places)
        self.rows.append(part.prompt[block.start : block.stop])
        self.places += [(part.slot, position, first) for position in block]
        if block.stop == len(part.prompt):
            self.ends |= 1 << len(self.places) - 1


def whole_tiles(positions: int, columns: int, wide: int) -> int:
    """How many of a prompt's first positions are whole blocks: one of `columns`, then of `wide`."""
    return columns + (positions - columns) // wide * wide if positions >= columns else 0


def _blocks(part: PrefillSegment, columns: int, wide: int) -> Iterator[range]:
    begin = part.begin
    while begin < part.end:
        end = begin + (wide if begin else columns)
        yield range(begin, min(end, part.end))
        begin = end


def pack_passes(
    parts: Sequence[PrefillSegment], columns: int, wide: int
) -> tuple[Tensor, "ctypes.Array[PrefillBatch]"]:
    """Packs parts into passes: each block as early as there is room, behind the one before it.

    Args:
        parts: Of different slots.
        columns: Positions of a prompt's first block.
        wide: Of its others, and of a pass at most.

    Returns:
        The vectors of all columns in their order, [columns of all passes, hidden], and the
        passes.
    """
    passes: list[_Pass] = []
    earliest = dict.fromkeys((part.slot for part in parts), 0)
    # Everybody's first blocks come first.
    rounds = zip_longest(
        *([(part, block) for block in _blocks(part, columns, wide)] for part in parts)
    )
    for part, block in filter(None, chain.from_iterable(rounds)):
        number = earliest[part.slot]
        while number < len(passes) and len(passes[number].places) + len(block) > wide:
            number += 1
        if number == len(passes):
            passes.append(_Pass())
        passes[number].take(part, block)
        earliest[part.slot] = number + 1
    batches = (PrefillBatch * len(passes))()
    row = 0
    for batch, one in zip(batches, passes, strict=True):
        batch.num_columns, batch.first_row = len(one.places), row
        batch.prompt_end_mask = one.ends
        for column, place in enumerate(one.places):
            batch.columns[column] = place
        row += len(one.places)
    return torch.cat([rows for one in passes for rows in one.rows]), batches
