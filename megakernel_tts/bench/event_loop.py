"""How late an asyncio event loop comes to its other work while streams speak on it."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from megakernel_tts.bench.timing import Request
from megakernel_tts.session import ChunkPolicy
from megakernel_tts.tts import TTS

_TICK = 0.001  # seconds: how often the event loop is asked whether it still turns
_REST = 0.2  # seconds of silence before each round


@dataclass(frozen=True)
class EventLoop:
    """Milliseconds that the event loop comes late to a timer.

    Attributes:
        streams: That speak at a time.
        rounds: How often.
        p50: While they do.
        p99: The same.
        most: The same.
        most_at_rest: Before they do: what the machine itself is late.
    """

    streams: int
    rounds: int
    p50: float
    p99: float
    most: float
    most_at_rest: float


def event_loop(tts: TTS, request: Request, streams: int, rounds: int) -> EventLoop:
    """Has streams speak by `TTS.astream` that begin together, all to their end.

    Args:
        tts: Warm, with as many slots.
        request: What each says, every stream with a seed of its own.
        streams: How many.
        rounds: How often.
    """
    with _without_collections():
        resting, speaking = asyncio.run(_watched(tts, request, streams, rounds))
    p50, p99 = np.percentile(speaking, (50, 99)).tolist()
    figures = (round(1e3 * late, 3) for late in (p50, p99, max(speaking), max(resting)))
    return EventLoop(streams, rounds, *figures)


@contextmanager
def _without_collections() -> Iterator[None]:
    """What is there stays out of garbage collections, as in a server once it is warm."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _watched(
    tts: TTS, request: Request, streams: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of lateness at every tick, at rest and while streams speak."""
    resting: list[float] = []
    speaking: list[float] = []
    for number in range(rounds):
        async with _watch(resting):
            await asyncio.sleep(_REST)
        seeds = range(number * streams, (number + 1) * streams)
        async with _watch(speaking):
            await asyncio.gather(*(_speak(tts, request, seed) for seed in seeds))
    return resting, speaking


async def _speak(tts: TTS, request: Request, seed: int) -> None:
    """One stream in chunks of one frame: whoever gets more of them keeps the loop busiest."""
    async for _ in tts.astream(
        request.text,
        request.voice,
        instruct=request.instruct,
        layout=request.layout,
        sampling=replace(request.sampling, seed=seed),
        chunks=ChunkPolicy(1, 1),
    ):
        pass


@asynccontextmanager
async def _watch(late: list[float]) -> AsyncIterator[None]:
    """Takes note meanwhile of how late the event loop comes to every tick, in seconds."""
    done = False

    async def tick() -> None:
        while not done:
            due = perf_counter() + _TICK
            await asyncio.sleep(_TICK)
            late.append(perf_counter() - due)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)  # it begins
    try:
        yield
    finally:
        done = True
        await ticking
