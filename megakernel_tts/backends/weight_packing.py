"""Packs weights in the order in which the thread blocks read them: see csrc/weights.cuh."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_tts.kernels.structs import ROW_GROUP_SIZE, STEP_K
from megakernel_tts.model.weights import Stack


@dataclass(frozen=True)
class Packer:
    """Splits matrices among thread blocks, and orders each share as its block reads it.

    Attributes:
        num_blocks: Thread blocks of the grid.
        stage_steps: Steps of K in a stage of the weight ring.
        max_row_groups: Row groups whose partial sums fit into a thread block.
        device: The device of the packed weights.
    """

    num_blocks: int
    stage_steps: int
    max_row_groups: int
    device: torch.device

    def pack(self, *weights: Stack | Tensor) -> Tensor:
        """Packs matrices into one tensor: for each thread block, its shares of all matrices.

        Each matrix is moved to the device and packed on its own, so no second copy of all weights
        exists at a time.

        Args:
            weights: Stacks, and matrices [rows, K]; on any device.

        Returns:
            bfloat16, one dimension.
        """
        shapes = [
            (sum(len(part) for part in parts), parts[0].shape[1]) for parts in _parts(weights)
        ]
        sizes = [
            sum(self._share_size(rows, k, block) for rows, k in shapes)
            for block in range(self.num_blocks)
        ]
        packed = torch.empty(sum(sizes), dtype=torch.bfloat16, device=self.device)
        offsets = list(accumulate(sizes, initial=0))
        for matrix in _matrices(weights, self.device):
            operands = _in_operand_order(matrix)
            for block in range(self.num_blocks):
                for row_groups in self._share(operands, block):
                    end = offsets[block] + len(row_groups)
                    packed[offsets[block] : end] = row_groups
                    offsets[block] = end
        return packed

    def _share_size(self, rows: int, k: int, block: int) -> int:
        """Elements of a matrix [rows, k] that a thread block reads."""
        first, end = (self._first_row_group(rows // ROW_GROUP_SIZE, b) for b in (block, block + 1))
        return (end - first) * ROW_GROUP_SIZE * (k + -k % STEP_K)

    def _share(self, operands: Tensor, block: int) -> list[Tensor]:
        """A thread block's share: up to `max_row_groups` at a time, of these stage after stage."""
        first, end = (self._first_row_group(len(operands), b) for b in (block, block + 1))
        stages = operands[first:end].unflatten(1, (-1, self.stage_steps))
        return [groups.transpose(0, 1).flatten() for groups in stages.split(self.max_row_groups)]

    def _first_row_group(self, num_row_groups: int, block: int) -> int:
        share, rest = divmod(num_row_groups, self.num_blocks)
        return block * share + min(block, rest)


def _in_operand_order(weight: Tensor) -> Tensor:
    """A matrix [rows, K] as [row groups, steps, 8 warps * 32 lanes * 8 elements]."""
    rows, k = weight.shape
    padded = F.pad(weight, (0, -k % STEP_K))
    pairs = padded.view(rows // ROW_GROUP_SIZE, 8, -1, 8, 4, 2, 2, 2)
    return pairs.permute(0, 2, 3, 1, 4, 6, 5, 7).flatten(5).flatten(3, 4)


def _parts(weights: Sequence[Stack | Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The matrices in the order of use, as the parts that have their rows."""
    for weight in weights:
        if isinstance(weight, Tensor):
            yield (weight,)
            continue
        for layer in weight.layers:
            yield layer.q, layer.k, layer.v
            yield (layer.o,)
            yield layer.gate, layer.up
            yield (layer.down,)


def _matrices(weights: Sequence[Stack | Tensor], device: torch.device) -> Iterator[Tensor]:
    """The matrices in the order of use, each moved to the device when it is needed.

    The rows of gate and up, the only pair of parts, alternate in groups of four.
    """
    for parts in _parts(weights):
        moved = [part.to(device) for part in parts]
        if len(moved) == 2:
            gate_up = torch.cat([part.unflatten(0, (-1, 4)) for part in moved], dim=1)
            yield gate_up.flatten(0, 1)
        else:
            yield torch.cat(moved)
