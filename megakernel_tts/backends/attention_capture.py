"""Attention capture: scores of chosen heads against the keys, scaled, before the softmax."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class AttentionObserver(Protocol):
    """Receives queries and keys of every layer while new positions pass through a stack."""

    def observe(self, layer: int, q: Tensor, keys: Tensor, slots: Sequence[int]) -> None:
        """Receives one layer.

        Args:
            layer: Index of the layer.
            q: Queries [batch, heads, new positions, head_dim].
            keys: Key cache [slots, kv heads, positions, head_dim], with the new positions.
            slots: Slot of each row of the batch.
        """
        ...


@dataclass
class HeadCapture:
    """Captures some heads while one new position of each stream passes.

    Attributes:
        heads: (layer, head) of each captured head.
        positions: Position of each stream.
        scores: [batch, heads, positions], filled up to and including each stream's position.
    """

    heads: Sequence[tuple[int, int]]
    positions: Sequence[int]
    scores: Tensor

    def observe(self, layer: int, q: Tensor, keys: Tensor, slots: Sequence[int]) -> None:
        """See `AttentionObserver.observe`."""
        captured = [(i, head) for i, (at, head) in enumerate(self.heads) if at == layer]
        num_sharing = q.shape[1] // keys.shape[1]  # query heads per kv head
        for i, head in captured:
            for row, (slot, position) in enumerate(zip(slots, self.positions, strict=True)):
                end = position + 1
                query = q[row, head, 0].float() / math.sqrt(q.shape[3])
                self.scores[row, i, :end] = keys[slot, head // num_sharing, :end].float() @ query


@dataclass
class AllHeadsCapture:
    """Captures all heads while a whole stream passes at once.

    Attributes:
        num_prompt: Positions of its prompt; frame f comes from position `num_prompt` + f - 1.
        first: First key position that is captured.
        count: Number of key positions.
        layers: For each layer [heads, frames, count]. NaN where there is no key yet, and for the
            first frame, as in `Frames.scores`.
    """

    num_prompt: int
    first: int
    count: int
    layers: list[Tensor] = field(default_factory=list[Tensor])

    def observe(self, layer: int, q: Tensor, keys: Tensor, slots: Sequence[int]) -> None:
        """See `AttentionObserver.observe`."""
        num_sharing = q.shape[1] // keys.shape[1]  # query heads per kv head
        window = slice(self.first, self.first + self.count)
        captured_keys = keys[slots[0], :, window].float().repeat_interleave(num_sharing, 0)
        queries = q[0, :, self.num_prompt - 1 :].float()
        scores = queries @ captured_keys.mT / math.sqrt(q.shape[3])
        frame = torch.arange(scores.shape[1], device=q.device)[:, None]
        position = torch.arange(self.first, self.first + self.count, device=q.device)
        has_key = (position < self.num_prompt + frame) & (frame > 0)
        self.layers.append(scores.masked_fill(~has_key, torch.nan).cpu())
