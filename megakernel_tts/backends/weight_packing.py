"""The weights in the order in which the kernel's blocks read them: see csrc/weights.cuh."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_tts.model.checkpoint import map_leaves
from megakernel_tts.model.weights import Stack

_STEP = 256  # of K, for a block
_UNIT = 8  # rows


@dataclass(frozen=True)
class Packer:
    """Knows how the kernel walks through the weights.

    Attributes:
        blocks: Of the grid.
        slot: Steps that are fetched together.
        units: Whose sums have room in a block.
        device: Where the packed weights are.
    """

    blocks: int
    slot: int
    units: int
    device: torch.device

    def pack(self, *parts: Stack | Tensor) -> Tensor:
        """Matrices as one stream a block, all blocks one after another.

        Each matrix goes to its places as it comes: there is no second copy of all of them.

        Args:
            parts: Stacks, and matrices [rows, K]; on any device.
        """
        shapes = [matrix.shape for matrix in _matrices(parts, torch.device("meta"))]
        sizes = [sum(self._elements(shape, b) for shape in shapes) for b in range(self.blocks)]
        packed = torch.empty(sum(sizes), dtype=torch.bfloat16, device=self.device)
        places = list(accumulate(sizes, initial=0))
        for matrix in _matrices(parts, self.device):
            tiles = _tiles(matrix)
            for block in range(self.blocks):
                for part in self._share(tiles, block):
                    end = places[block] + len(part)
                    packed[places[block] : end] = part
                    places[block] = end
        return packed

    def _elements(self, shape: torch.Size, block: int) -> int:
        """How much a block reads of a matrix."""
        rows, k = shape
        first, end = (self._begin(rows // _UNIT, b) for b in (block, block + 1))
        return (end - first) * _UNIT * (k + -k % _STEP)

    def _share(self, tiles: Tensor, block: int) -> list[Tensor]:
        """What a block reads of a matrix: some units at a time, of these slot after slot."""
        first, end = (self._begin(len(tiles), b) for b in (block, block + 1))
        slots = tiles[first:end].unflatten(1, (-1, self.slot))
        return [some.transpose(0, 1).flatten() for some in slots.split(self.units)]

    def _begin(self, units: int, block: int) -> int:
        return block * (units // self.blocks) + min(block, units % self.blocks)


def _tiles(weight: Tensor) -> Tensor:
    """[rows, K] as [units, steps, 8 warps, 32 lanes, 8]."""
    rows, k = weight.shape
    padded = F.pad(weight, (0, -k % _STEP))
    pairs = padded.view(rows // _UNIT, 8, -1, 8, 4, 2, 2, 2).permute(0, 2, 3, 1, 4, 6, 5, 7)
    return pairs.flatten(5).flatten(3, 4)


def _matrices(parts: Sequence[Stack | Tensor], device: torch.device) -> Iterator[Tensor]:
    """In the order of use, each on the device for as long as it is looked at.

    Of a stack, all layers; rows of gate and up in turn, four by four.
    """
    for part in parts:
        if isinstance(part, Tensor):
            yield part.to(device)
            continue
        for layer in part.layers:
            w = map_leaves(layer, lambda tensor: tensor.to(device))
            gate_up = torch.cat([w.gate.unflatten(0, (-1, 4)), w.up.unflatten(0, (-1, 4))], dim=1)
            yield torch.cat([w.q, w.k, w.v])
            yield w.o
            yield gate_up.flatten(0, 1)
            yield w.down
