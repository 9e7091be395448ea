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
    places: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])


def pack(parts: Sequence[Part], columns: int) -> tuple[Tensor, Tensor]:
    """Packs parts into passes, each block as early as there is room behind the one before it.

    Args:
        parts: Of different slots.
        columns: Of a pass at most, and positions of a block.

    Returns:
        The vectors of all columns in their order, [columns of all passes, hidden], and the passes
        as in csrc/params.cuh, [passes, 1 + 4 * columns] (int32).
    """
    passes: list[_Pass] = []
    for slot, prompt, begin, end in parts:
        earliest = 0
        for start in range(begin, end, columns):
            block = range(start, min(start + columns, end))
            number = next(
                (
                    i
                    for i in range(earliest, len(passes))
                    if len(passes[i].places) + len(block) <= columns
                ),
                len(passes),
            )
            if number == len(passes):
                passes.append(_Pass())
            chosen, earliest = passes[number], number + 1
            first = len(chosen.places)
            chosen.rows.append(prompt[block.start : block.stop])
            chosen.places += [(slot, at, first, at == len(prompt) - 1) for at in block]
    table = np.zeros((len(passes), 1 + 4 * columns), np.int32)
    for row, one in zip(table, passes, strict=True):
        row[0] = len(one.places)
        row[1 : 1 + 4 * len(one.places)] = np.ravel(one.places)
    return torch.cat([rows for one in passes for rows in one.rows]), torch.from_numpy(table)
