"""A stream outside its slot: all that lay in the slot's part of a backend's buffers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

State = TypeVar("State")


@dataclass(frozen=True)
class SlotSnapshot(Generic[State]):
    """A stream on the host.

    Attributes:
        state: What the backend knows of it beside its buffers.
        parts: Copies of the slot's parts of the buffers, in the backend's own order.
    """

    state: State
    parts: tuple[Tensor, ...]


def take_snapshot(state: State, parts: Sequence[Tensor]) -> SlotSnapshot[State]:
    """Copies a slot's parts, views of the backend's buffers, to the host."""
    return SlotSnapshot(state, tuple(part.to("cpu", copy=True) for part in parts))


def restore_snapshot(suspended: SlotSnapshot[State], parts: Sequence[Tensor]) -> State:
    """Copies them into the same parts of another slot."""
    for part, kept in zip(parts, suspended.parts, strict=True):
        part.copy_(kept)
    return suspended.state
