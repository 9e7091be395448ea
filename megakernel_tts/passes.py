"""Which positions of which prompts go through the talker's kernel together, as columns of a pass.

A prompt's positions go in whole blocks, always the same ones: positions of one pass see each other
in float32, those of earlier passes in bfloat16, so that another grouping would round otherwise.
Blocks of other prompts beside them change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Part(NamedTuple):
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

    def take(self, part: Part, block: range) -> None:
        """Adds a block of a part."""
        first = len(self.places)
        self.rows.append(part.prompt[block.start : block.stop])
        self.places += [(part.slot, position, first) for position in block]
        if block.stop == len(part.prompt):
            self.ends |= 1 << len(self.places) - 1


def pack(parts: Sequence[Part], columns: int) -> tuple[Tensor, Tensor]:
    """Packs parts into passes: each block as early as there is room, behind the one before it.

    Args:
        parts: Of different slots.
        columns: Of a pass at most, and positions of a block.

    Returns:
        The vectors of all columns in their order, [columns of all passes, hidden], and the passes
        as in csrc/params.cuh, [passes, 2 + 3 * columns] (int32).
    """
    passes: list[_Pass] = []
    earliest = dict.fromkeys((part.slot for part in parts), 0)
    longest = max(part.end - part.begin for part in parts)
    for step in range(0, longest, columns):  # everybody's first blocks, which are full, come first
        for part in parts:
            block = range(part.begin + step, min(part.begin + step + columns, part.end))
            if not block:
                continue
            number = earliest[part.slot]
            while number < len(passes) and len(passes[number].places) + len(block) > columns:
                number += 1
            if number == len(passes):
                passes.append(_Pass())
            passes[number].take(part, block)
            earliest[part.slot] = number + 1
    table = np.zeros((len(passes), 2 + 3 * columns), np.int32)
    for row, one in zip(table, passes, strict=True):
        row[:2] = len(one.places), one.ends
        row[2 : 2 + 3 * len(one.places)] = np.ravel(one.places)
    return torch.cat([rows for one in passes for rows in one.rows]), torch.from_numpy(table)
