import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from megakernel_tts.server.errors import SlowClientError
from megakernel_tts.server.playback import MAX_BEHIND_S, PlaybackClock


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def accept(clock: Clock, after_s: float = 0.0) -> None:
    """Accepts audio after some time of the clock."""
    clock.now_s += after_s


def test_the_lead_is_what_was_sent_less_what_was_played() -> None:
    clock = Clock()
    playback = PlaybackClock(clock)
    assert playback.lead_s == 0
    asyncio.run(playback.send(accept(clock), 2.0))
    clock.now_s += 0.5
    asyncio.run(playback.send(accept(clock), 1.0))
    assert playback.lead_s == pytest.approx(2.5)
    assert playback.underrun_s == 0


def test_playback_waits_for_late_audio() -> None:
    clock = Clock()
    playback = PlaybackClock(clock)
    asyncio.run(playback.send(accept(clock), 1.0))
    clock.now_s += 1.25
    asyncio.run(playback.send(accept(clock), 1.0))
    assert playback.underrun_s == pytest.approx(0.25)
    assert playback.lead_s == pytest.approx(1.0)


def test_a_client_that_reads_slower_than_playback_is_refused() -> None:
    """It takes two seconds for each second of audio, and is 30 s behind after 30 of them."""
    clock = Clock()
    playback = PlaybackClock(clock)

    async def send_all() -> int:
        for num_sent in range(100):
            try:
                await playback.send(accept(clock, 2.0), 1.0)
            except SlowClientError:
                return num_sent
        return 100

    assert asyncio.run(send_all()) in (30, 31)


def test_a_client_that_reads_in_bursts_is_served() -> None:
    clock = Clock()
    playback = PlaybackClock(clock)

    async def send_all() -> None:
        for _ in range(50):
            await playback.send(accept(clock, 20.0), 1.0)
            for _ in range(19):
                await playback.send(accept(clock), 1.0)

    asyncio.run(send_all())


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock, which is advanced instead of waiting."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(ClockSelector(clock))
        self.time = clock


class ClockSelector(selectors.SelectSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        self._clock.now_s += timeout or 0.0
        return super().select(0)


def run(clock: Clock, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: ClockLoop(clock)) as runner:
        runner.run(main)


@pytest.mark.parametrize("num_ahead", [0, 1, 60])
def test_a_client_that_stops_reading_is_refused_30_s_after_the_end_of_what_it_has_read(
    num_ahead: int,
) -> None:
    clock = Clock()
    playback, start_s = PlaybackClock(clock), clock.now_s

    async def send_all() -> None:
        for _ in range(num_ahead):
            await playback.send(asyncio.sleep(0), 1.0)
        with pytest.raises(SlowClientError):
            await playback.send(asyncio.Event().wait(), 1.0)  # type: ignore[arg-type]

    run(clock, send_all())
    assert clock.now_s - start_s == pytest.approx(num_ahead + MAX_BEHIND_S, abs=0.01)


def test_a_client_with_a_buffer_may_pause_until_it_was_played() -> None:
    """After 45 s without reading it has 15 s of its 60 left, and is not behind later either."""
    clock = Clock()
    playback = PlaybackClock(clock)

    async def send_all() -> None:
        for _ in range(60):
            await playback.send(asyncio.sleep(0), 1.0)
        await playback.send(asyncio.sleep(45.0), 1.0)
        await playback.send(asyncio.sleep(MAX_BEHIND_S + 15.0), 1.0)

    run(clock, send_all())


def test_a_buffer_is_played_while_there_is_nothing_to_send() -> None:
    clock = Clock()
    playback, start_s = PlaybackClock(clock), clock.now_s

    async def send_all() -> None:
        for _ in range(60):
            await playback.send(asyncio.sleep(0), 1.0)
        await asyncio.sleep(50.0)  # 10 s are left
        with pytest.raises(SlowClientError):
            await playback.send(asyncio.Event().wait(), 1.0)  # type: ignore[arg-type]

    run(clock, send_all())
    assert clock.now_s - start_s == pytest.approx(60 + MAX_BEHIND_S, abs=0.01)


def test_waits_for_the_engine_do_not_put_a_client_behind() -> None:
    clock = Clock()
    playback, start_s = PlaybackClock(clock), clock.now_s

    async def send_all() -> None:
        await playback.send(asyncio.sleep(0), 1.0)
        await asyncio.sleep(100.0)
        with pytest.raises(SlowClientError):
            await playback.send(asyncio.Event().wait(), 1.0)  # type: ignore[arg-type]

    run(clock, send_all())
    assert clock.now_s - start_s == pytest.approx(100 + MAX_BEHIND_S, abs=0.01)
