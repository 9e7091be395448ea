"""The end of a GPU's work, with CUDA events that only record their calls."""

import pytest
import torch

from megakernel_common.devices import CompletionEvent


class _Event:
    """A CUDA event that the GPU passes when the host has waited for it."""

    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking
        self.streams: list[object] = []
        self.is_passed = False

    def record(self, stream: object) -> None:
        self.streams.append(stream)
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        assert self.streams, "was not recorded"
        self.is_passed = True


class _Stream:
    def __init__(self) -> None:
        self.awaited: list[_Event] = []

    def wait_event(self, event: _Event) -> None:
        self.awaited.append(event)


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("sleeping", [True, False])
def test_the_host_and_streams_wait_for_the_event_that_was_recorded_last(
    monkeypatch: pytest.MonkeyPatch, sleeping: bool, earlier: bool
) -> None:
    """The one that it sleeps for, or the other one."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    completion, stream, other = CompletionEvent(), _Stream(), _Stream()
    completion.record(stream, sleeping=earlier)  # type: ignore[arg-type]
    completion.synchronize()
    completion.record(stream, sleeping=sleeping)  # type: ignore[arg-type]
    assert not completion.query()
    completion.delay(other)  # type: ignore[arg-type]
    (event,) = other.awaited
    assert event.blocking == sleeping and event.streams[-1] is stream
    completion.synchronize()
    assert event.is_passed and completion.query()
