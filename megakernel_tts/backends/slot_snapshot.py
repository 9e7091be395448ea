"""The state of a stream that is swapped out of its slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

State = TypeVar("State")


@dataclass(frozen=True)
class SlotSnapshot(Generic[State]):
    """A stream's state in host memory.

    Attributes:
        state: The backend's record of the stream.
        tensors: Copies of the slot's views of the backend's buffers, in the backend's order.
    """

    state: State
    tensors: tuple[Tensor, ...]


def take_snapshot(state: State, views: Sequence[Tensor]) -> SlotSnapshot[State]:
    """Copies a slot's views of the backend's buffers to the host."""
    return SlotSnapshot(state, tuple(view.to("cpu", copy=True) for view in views))


def restore_snapshot(snapshot: SlotSnapshot[State], views: Sequence[Tensor]) -> State:
    """Copies a snapshot into the same views of another slot, and returns its `state`."""
    for view, saved in zip(views, snapshot.tensors, strict=True):
        view.copy_(saved)
    return snapshot.state
