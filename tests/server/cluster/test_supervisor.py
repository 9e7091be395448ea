"""Restarts in virtual time, with processes that last as long as a test says."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bench.virtual_time import run_in_virtual_time
from megakernel_tts import CheckpointError
from megakernel_tts.server.cluster import supervisor
from megakernel_tts.server.cluster.messages import Load
from megakernel_tts.server.cluster.supervisor import Supervisor, restart_delay_s

LOAD = Load("cpu:0", "demo", "cpu", 1, "text")


class ScriptedProcess:
    """Stands in for an `EngineClient`: ends with status 1 after some seconds, or when closed."""

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._closed = asyncio.Event()

    def close(self) -> None:
        self._closed.set()

    async def wait_closed(self) -> int:
        try:
            async with asyncio.timeout(self._lifetime_s):
                await self._closed.wait()
        except TimeoutError:
            return 1
        return 0


class Starts:
    """Starts processes with given lifetimes (None: the model cannot be loaded).

    Attributes:
        times_s: Of the starts.
        num_restarts: Restarts that were reported.
    """

    def __init__(self, lifetimes_s: Sequence[float | None]) -> None:
        self.times_s: list[float] = []
        self.num_restarts = 0
        self._lifetimes_s: Iterator[float | None] = iter(lifetimes_s)

    async def start(self, *_: Any) -> ScriptedProcess:
        self.times_s.append(asyncio.get_running_loop().time())
        lifetime_s = next(self._lifetimes_s)
        if lifetime_s is None:
            raise CheckpointError("There is no model.")
        return ScriptedProcess(lifetime_s)

    def count(self) -> None:
        self.num_restarts += 1


def run(
    monkeypatch: pytest.MonkeyPatch, lifetimes_s: Sequence[float | None], duration_s: float
) -> Starts:
    """Supervises for some seconds."""
    starts = Starts(lifetimes_s)
    monkeypatch.setattr(supervisor.EngineClient, "start", starts.start)

    async def main() -> None:
        one = Supervisor([], {}, LOAD, on_change=lambda: None, on_restart=starts.count)
        await one.start()
        await asyncio.sleep(duration_s)
        one.close()
        await one.wait_closed()

    run_in_virtual_time(main(), 2 * duration_s)
    return starts


def test_failures_in_a_row_are_further_and_further_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = run(monkeypatch, [10, 0, None, None, 0, 1000], 100)
    assert starts.times_s == pytest.approx([0, 10.25, 10.75, 11.75, 13.75, 17.75])
    assert starts.num_restarts == 5


def test_an_engine_that_ran_long_is_restarted_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = run(monkeypatch, [10, 1, 100, 5, 1000], 200)
    assert starts.times_s == pytest.approx([0, 10.25, 11.75, 112, 117.5])


def test_an_engine_that_is_closed_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, [1000], 50).times_s == [0]


def test_a_supervisor_that_is_closed_during_the_delay_does_not_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(monkeypatch, [10], 10.1).times_s == [0]


def test_the_first_load_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError):
        run(monkeypatch, [None], 1)


def test_the_delay_is_bounded() -> None:
    delays = [restart_delay_s(failures) for failures in (1, 2, 7, 8, 10_000)]
    assert delays == [0.25, 0.5, 16, 30, 30]
