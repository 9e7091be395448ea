"""Delays of an asyncio event loop while it serves streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from megakernel_tts import TTS
from megakernel_tts.bench.heap import frozen_heap
from megakernel_tts.bench.timing import BenchmarkRequest, bind_request

_TIMER_INTERVAL_S = 0.001
_IDLE_S = 0.2  # before each round


@dataclass(frozen=True)
class EventLoop:
    """Delays of timers on the event loop, in milliseconds.

    Attributes:
        streams: Number of simultaneous streams.
        rounds: Number of rounds.
        p50: Median while the streams are synthesised.
        p99: 99th percentile while the streams are synthesised.
        max: Maximum while the streams are synthesised.
        max_idle: Maximum while the event loop is idle: the delay of the machine itself.
    """

    streams: int
    rounds: int
    p50: float
    p99: float
    max: float
    max_idle: float


def measure_event_loop(tts: TTS, request: BenchmarkRequest, streams: int, rounds: int) -> EventLoop:
    """Measures timer delays while `TTS.astream` runs several streams on the event loop.

    Args:
        tts: Warm, with at least as many slots as streams.
        request: Of each stream; every stream has a different seed.
        streams: Streams that begin at the same time.
        rounds: Number of rounds; each ends when all streams end.
    """
    with frozen_heap():
        idle, busy = asyncio.run(_timer_delays(tts, request, streams, rounds))
    p50, p99 = np.percentile(busy, (50, 99)).tolist()
    figures = (round(1e3 * delay, 3) for delay in (p50, p99, max(busy), max(idle)))
    return EventLoop(streams, rounds, *figures)


async def _timer_delays(
    tts: TTS, request: BenchmarkRequest, streams: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Delays of all timers in seconds: while the loop is idle, and while it serves streams."""
    idle: list[float] = []
    busy: list[float] = []
    for number in range(rounds):
        async with _recorded_delays(idle):
            await asyncio.sleep(_IDLE_S)
        seeds = range(number * streams, (number + 1) * streams)
        async with _recorded_delays(busy):
            await asyncio.gather(*(_consume_stream(tts, request, seed) for seed in seeds))
    return idle, busy


async def _consume_stream(tts: TTS, request: BenchmarkRequest, seed: int) -> None:
    """Runs one stream in chunks of one frame, which cause the most work on the event loop."""
    async for _ in bind_request(tts.astream, request, 1, seed)():
        pass


@asynccontextmanager
async def _recorded_delays(delays: list[float]) -> AsyncIterator[None]:
    """Context that appends the delay of each timer to a list, in seconds."""
    done = False

    async def run_timers() -> None:
        while not done:
            due = perf_counter() + _TIMER_INTERVAL_S
            await asyncio.sleep(_TIMER_INTERVAL_S)
            delays.append(perf_counter() - due)

    timers = asyncio.create_task(run_timers())
    await asyncio.sleep(0)  # starts the task
    try:
        yield
    finally:
        done = True
        await timers
