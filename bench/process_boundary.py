"""Measures what the boundary between the front and an engine process adds to the first chunk.

Requests to an engine in this process and to one in a process of its own alternate. The engine is
simulated and takes a fixed time per frame, so the difference is that of the boundary. "Live text"
opens a session and then pushes the text, which takes another message to the engine process.

python -m bench.process_boundary --json bench/results/process-boundary-cpu.json
"""

import argparse
import asyncio
import gc
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np

from bench.report import write
from bench.simulated_engine import SIMULATED_ENGINE
from bench.simulation import simulated_tts
from megakernel_tts import LivePolicy, Sampling
from megakernel_tts.server.cluster.engine_cluster import EngineCluster
from megakernel_tts.server.cluster.placement import Placement
from megakernel_tts.server.engine import SpeechEngine, SpeechSession

_FRAME_S = 0.005  # of the simulated engine
_SLOTS = 16
_PLACEMENTS = (Placement("cpu:0", "cpu", {}),)
_MAX_PAUSE_S = 4 * _FRAME_S  # before a request, which comes at any time of a frame
_TEXT = "Certainly, I can help you with that. Which day of the week would suit you best?"


async def open_session(engine: SpeechEngine, text: str | None) -> SpeechSession:
    """Opens a session as the server does."""
    return await engine.aopen(
        None,
        "auto",
        None,
        layout="auto",
        sampling=Sampling(seed=0),
        chunks=LivePolicy().chunks,
        speed=1.0,
        pronunciations={},
        text=text,
        priority=0,
    )


async def read_to_end(session: SpeechSession) -> None:
    """Reads the rest of a session."""
    async with aclosing(aiter(session)) as events:
        async for _ in events:
            pass


async def time_first_chunk(engine: SpeechEngine, *, live: bool) -> float:
    """Returns the seconds from a text to its first chunk, and ends the stream."""
    start_s = time.perf_counter()
    session = await open_session(engine, None if live else _TEXT)
    if live:
        await session.apush_text(_TEXT)
    async with aclosing(aiter(session)) as events:
        await anext(events)
    seconds = time.perf_counter() - start_s
    session.cancel()
    await read_to_end(session)
    return seconds


async def speak(engine: SpeechEngine) -> None:
    """Speaks and reads texts until it is cancelled."""
    while True:
        session = await open_session(engine, _TEXT)
        try:
            await read_to_end(session)
        finally:
            session.cancel()


async def measure(
    engines: Sequence[SpeechEngine], requests: int, other_streams: int, *, live: bool
) -> list[list[float]]:
    """Returns the times to the first chunk of each engine, in seconds.

    Args:
        engines: Are measured alternately.
        requests: Of each engine.
        other_streams: Streams that the measured engine speaks meanwhile.
        live: Whether text is pushed after the session was opened.
    """
    times_s: list[list[float]] = [[] for _ in engines]
    rng = random.Random(0)
    rounds = 10
    for _ in range(rounds):
        for engine, times in zip(engines, times_s, strict=True):
            others = [asyncio.create_task(speak(engine)) for _ in range(other_streams)]
            await asyncio.sleep(10 * _FRAME_S)
            for _ in range(requests // rounds):
                await asyncio.sleep(rng.uniform(0, _MAX_PAUSE_S))
                times.append(await time_first_chunk(engine, live=live))
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
    return times_s


def describe(times_s: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns medians and 95th percentiles in milliseconds, and their differences."""
    local, cluster = (1000 * np.percentile(times, [50, 95]) for times in times_s)
    figures = {
        "in_process_p50": local[0],
        "in_process_p95": local[1],
        "engine_process_p50": cluster[0],
        "engine_process_p95": cluster[1],
        "added_p50": cluster[0] - local[0],
        "added_p95": cluster[1] - local[1],
    }
    return {name: round(float(figure), 2) for name, figure in figures.items()}


async def run(requests: int, other_streams: int) -> dict[str, dict[str, float]]:
    """Returns the figures of all cases."""
    figures: dict[str, dict[str, float]] = {}
    with simulated_tts(_SLOTS, _FRAME_S) as local:
        await local.awarmup()
        async with EngineCluster.start(
            str(_FRAME_S), _PLACEMENTS, _SLOTS, command=SIMULATED_ENGINE
        ) as cluster:
            await cluster.awarmup()
            gc.freeze()  # as recommended for servers
            for streams in (0, other_streams):
                for live in (False, True):
                    times_s = await measure([local, cluster], requests, streams, live=live)
                    name = f"{'live' if live else 'whole'}_text_beside_{streams}_streams"
                    figures[name] = describe(times_s)
    return figures


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=500, help="of each engine and case")
    parser.add_argument("--other-streams", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    figures = asyncio.run(run(options.requests, options.other_streams))
    settings = {"engine": "simulated", "frame_ms": 1000 * _FRAME_S, "requests": options.requests}
    write(settings | {"first_chunk_ms": figures}, options.json, packages=("torch",))


if __name__ == "__main__":
    main()
