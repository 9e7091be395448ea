"""What heads of the talker look at: their scores against the keys, before the softmax."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class AttentionObserver(Protocol):
    """Is shown every layer while new positions pass through it."""

    def look(self, layer: int, q: Tensor, keys: Tensor, slots: Sequence[int]) -> None:
        """Takes note of a layer.

        Args:
            layer: Its number.
            q: Queries [batch, heads, new positions, head_dim].
            keys: [slots, kv heads, positions, head_dim], those of the new positions too.
            slots: Of each row of the batch.
        """
        ...


@dataclass
class HeadCapture:
    """A `AttentionObserver` of some heads while each stream's next position passes.

    Attributes:
        heads: Layer and head of each.
        places: Each stream's position.
        scores: [batch, heads, positions], where they go.
    """

    heads: Sequence[tuple[int, int]]
    places: Sequence[int]
    scores: Tensor

    def look(self, layer: int, q: Tensor, keys: Tensor, slots: Sequence[int]) -> None:
        """See `AttentionObserver.look`."""
        captured = [(i, head) for i, (where, head) in enumerate(self.heads) if where == layer]
        shared = q.shape[1] // keys.shape[1]  # query heads of a key's head
        for i, head in captured:
            for row, (slot, place) in enumerate(zip(slots, self.places, strict=True)):
                known = keys[slot, head // shared, : place + 1].float()
                query = q[row, head, 0].float() / math.sqrt(q.shape[3])
                self.scores[row, i, : place + 1] = known @ query


@dataclass
class AllHeadsCapture:
    """A `AttentionObserver` of all heads while one whole stream passes at once.

    Attributes:
        prompt: Positions of its prompt; frame f comes from position prompt + f - 1.
        first: The first position whose key is looked at.
        count: How many follow.
        layers: What was seen, each [heads, frames, count]; NaN where there is no key yet, and for
            the first frame, as in `Frames.scores`.
    """

    prompt: int
    first: int
    count: int
    layers: list[Tensor] = field(default_factory=list[Tensor])

    def look(self, layer: int, q: Tensor, keys: Tensor, slots: Sequence[int]) -> None:
        """See `AttentionObserver.look`."""
        shared = q.shape[1] // keys.shape[1]
        window = slice(self.first, self.first + self.count)
        known = keys[slots[0], :, window].float().repeat_interleave(shared, 0)
        scores = q[0, :, self.prompt - 1 :].float() @ known.mT / math.sqrt(q.shape[3])
        frame = torch.arange(scores.shape[1], device=q.device)[:, None]
        place = torch.arange(self.first, self.first + self.count, device=q.device)
        there = (place < self.prompt + frame) & (frame > 0)
        self.layers.append(scores.masked_fill(~there, torch.nan).cpu())
