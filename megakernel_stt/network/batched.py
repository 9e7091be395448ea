"""States of streams: joined to a batch for a step, and split again after it."""

from dataclasses import fields
from typing import Self

import torch
from torch import Tensor


class Batched:
    """A dataclass of tensors whose first axis is the stream."""

    @classmethod
    def join(cls, states: "list[Self]") -> Self:
        """One state of several streams.

        Args:
            states: At least one.
        """
        columns = (_columns(state) for state in states)
        return cls(*(torch.cat(column) for column in zip(*columns, strict=True)))

    def split(self) -> list[Self]:
        """A state of each stream."""
        columns = _columns(self)
        if len(columns[0]) == 1:
            return [self]
        # Copies: a view would keep the states of all streams for as long as one of them is idle.
        rows = zip(*(map(Tensor.clone, column.split(1)) for column in columns), strict=True)
        return [type(self)(*row) for row in rows]

    def select(self, indices: Tensor) -> Self:
        """Copies of the states of some streams.

        Args:
            indices: [streams] int64.
        """
        return type(self)(*(column.index_select(0, indices) for column in _columns(self)))

    def store(self, indices: Tensor, states: Self) -> None:
        """Replaces the states of some streams in place.

        Args:
            indices: [streams] int64. If one occurs twice, either of its states is stored.
            states: [streams, ...].
        """
        for column, new in zip(_columns(self), _columns(states), strict=True):
            column.index_copy_(0, indices, new)


def _columns(state: Batched) -> list[Tensor]:
    return [getattr(state, f.name) for f in fields(state)]  # type: ignore[arg-type]
