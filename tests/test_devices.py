"""Waiting for the work of a GPU, with an event that the host's sleep brings nearer."""

import time

import pytest

from megakernel_common.devices import wait_for_event


class _Event:
    """An event that the GPU passes after the host has slept three times, or spun."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds < 1e-4
        self.calls.append("sleep")

    def query(self) -> bool:
        return self.calls.count("sleep") >= 3

    def synchronize(self) -> None:
        self.calls.append("over" if self.query() else "spin")


@pytest.mark.parametrize(
    ("spinning", "calls"), [(True, ["spin"]), (False, ["sleep", "sleep", "sleep", "over"])]
)
def test_a_wait_spins_or_polls(
    monkeypatch: pytest.MonkeyPatch, spinning: bool, calls: list[str]
) -> None:
    event = _Event()
    monkeypatch.setattr(time, "sleep", event.sleep)
    wait_for_event(event, spinning=spinning)  # type: ignore[arg-type]
    assert event.calls == calls
