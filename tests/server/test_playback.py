import asyncio

import pytest

from megakernel_tts.server.errors import SlowClientError
from megakernel_tts.server.playback import PlaybackClock


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
