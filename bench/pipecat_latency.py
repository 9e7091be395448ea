"""What the Pipecat service adds: to the first audio, and to the event loop.

A simulated engine takes a fixed time for a frame, so that what is measured is the service alone; a
model that is named shows it beside the engine that callers will have.

python -m bench.pipecat_latency --json bench/results/pipecat-latency.json
python -m megakernel_tts.model.random_released /tmp/random-0.6B
python -m bench.pipecat_latency --model /tmp/random-0.6B --json bench/results/pipecat-h200.json
"""

import argparse
import asyncio
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from loguru import logger

from bench.line import line
from bench.report import write
from bench.simulation import simulated_tts
from megakernel_tts import TTS, AudioChunk, Sampling

_FRAME = 0.005  # seconds of the simulated engine for a frame
_RESTS = (0.02, 0.1)  # seconds in which nothing runs: a caller's audio comes as often, or none does
_SPEECH = Sampling(seed=0, max_frames=75, guard=False)  # noise has no end of its own
_TICK = 0.001  # seconds: how often the event loop is asked whether it still turns
_TEXT = "Certainly, I can help you with that. Which day of the week would suit you best?"


async def first_audio_of_the_engine(engine: TTS) -> float:
    """The same without Pipecat."""
    start = time.perf_counter()
    session = await asyncio.to_thread(engine.open, sampling=_SPEECH)
    with session:
        session.push_text(_TEXT)
        async for event in session:
            if isinstance(event, AudioChunk):
                break
        return time.perf_counter() - start


@dataclass(frozen=True)
class Added:
    """To the first audio, in milliseconds, engine and service taken in turn.

    Attributes:
        engine_p50: Without Pipecat.
        service_p50: With it.
        added_p50: The difference of the medians.
        added_p95: The difference of the 95th percentiles.
    """

    engine_p50: float
    service_p50: float
    added_p50: float
    added_p95: float


async def measure_added(engine: TTS, turns: int, seconds: float) -> Added:
    """Compares turn by turn, with a rest of so many seconds before each."""

    async def rest() -> None:
        while engine._loaded.engine.sessions:  # noqa: ASYNC110
            await asyncio.sleep(_TICK)
        await asyncio.sleep(seconds)

    alone: list[float] = []
    within: list[float] = []
    async with line(engine, _SPEECH) as call:
        for _ in range(turns):
            await rest()
            alone.append(await first_audio_of_the_engine(engine))
            await rest()
            within.append(await call.first_audio(_TEXT))
            await call.interrupt()
    bare, full = (1000 * np.percentile(times, [50, 95]) for times in (alone, within))
    figures = [bare[0], full[0], *(full - bare)]
    return Added(*(round(float(figure), 2) for figure in figures))


async def measure_stalls(engine: TTS, sessions: int, seconds: float) -> list[float]:
    """How late the event loop comes to a timer while sessions speak, sorted, in milliseconds."""
    late: list[float] = []

    async def watch() -> None:
        while True:
            due = time.perf_counter() + _TICK
            await asyncio.sleep(_TICK)
            late.append(1000 * (time.perf_counter() - due))

    async def converse() -> None:
        async with line(engine, _SPEECH) as call:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                await call.begin(_TEXT)
                await call.finish()

    conversations = [asyncio.create_task(converse()) for _ in range(sessions)]
    await asyncio.sleep(1.0)  # pipelines are built before calls begin
    watcher = asyncio.create_task(watch())
    await asyncio.wait(conversations, timeout=seconds - 1.0)
    watcher.cancel()
    await asyncio.gather(*conversations)
    return sorted(late)


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="demo, a folder or a hub id, in place of a simulated one")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    if options.model is None:
        name, engine = "simulated", simulated_tts(slots=16, frame_seconds=_FRAME)
    else:
        name, engine = options.model, TTS.load(options.model, slots=options.sessions)
    with engine:
        engine.warmup()
        gc.freeze()  # as a server should
        added = {
            f"after_{round(1000 * rest)}_ms": vars(
                asyncio.run(measure_added(engine, options.turns, rest))
            )
            for rest in _RESTS
        }
        late = asyncio.run(measure_stalls(engine, options.sessions, options.seconds))
    write(
        {
            "model": name,
            "backend": engine._loaded.engine.backend.name,
            **({"frame_ms": 1000 * _FRAME} if options.model is None else {}),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "turns": options.turns,
            "first_audio_ms": added,
            "sessions": options.sessions,
            "seconds": options.seconds,
            "loop_late_ms": {
                "p50": round(late[len(late) // 2], 2),
                "p99": round(late[len(late) * 99 // 100], 2),
                "max": round(late[-1], 2),
            },
        },
        options.json,
        packages=("pipecat-ai", "torch"),
    )


if __name__ == "__main__":
    main()
