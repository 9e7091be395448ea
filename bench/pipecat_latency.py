"""Measures the Pipecat service: what it adds to the first audio, and delays of the event loop.

The default engine is simulated and takes a fixed time per frame, so the figures are the service's.
With --model the same is measured beside a real engine.

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

from bench.report import write
from bench.running_pipeline import run_pipeline
from bench.simulation import simulated_tts
from megakernel_tts import TTS, AudioChunk, Sampling

_FRAME_S = 0.005  # duration of a frame in the simulated engine
# Pauses before a turn: with the caller's audio (a frame every 20 ms), and without any.
_PAUSES_S = (0.02, 0.1)
_SAMPLING = Sampling(seed=0, max_frames=75, guard=False)  # random weights never end their speech
_TIMER_S = 0.001  # period of the timer whose delay is measured
_SETUP_S = 1.0  # until all pipelines run
_TEXT = "Certainly, I can help you with that. Which day of the week would suit you best?"


async def time_first_chunk(engine: TTS) -> float:
    """Seconds from a text to its first chunk without Pipecat."""
    start_s = time.perf_counter()
    session = await asyncio.to_thread(engine.open, sampling=_SAMPLING)
    with session:
        session.push_text(_TEXT)
        async for event in session:
            if isinstance(event, AudioChunk):
                break
        return time.perf_counter() - start_s


@dataclass(frozen=True)
class AddedLatency:
    """Milliseconds to the first audio; engine and service are measured alternately.

    Attributes:
        engine_p50: Without Pipecat.
        service_p50: With the service.
        added_p50: Difference of the medians.
        added_p95: Difference of the 95th percentiles.
    """

    engine_p50: float
    service_p50: float
    added_p50: float
    added_p95: float


async def measure_added(engine: TTS, turns: int, pause_s: float) -> AddedLatency:
    """Measures the added latency.

    Args:
        engine: A warm engine.
        turns: Number of turns of each kind.
        pause_s: Pause before each turn.
    """

    async def pause() -> None:
        while engine._loaded.engine.num_sessions:  # noqa: ASYNC110
            await asyncio.sleep(_TIMER_S)
        await asyncio.sleep(pause_s)

    engine_times: list[float] = []
    service_times: list[float] = []
    async with run_pipeline(engine, _SAMPLING) as pipeline:
        for _ in range(turns):
            await pause()
            engine_times.append(await time_first_chunk(engine))
            await pause()
            service_times.append(await pipeline.time_first_audio(_TEXT))
            await pipeline.interrupt()
    bare, full = (1000 * np.percentile(times, [50, 95]) for times in (engine_times, service_times))
    figures = [bare[0], full[0], *(full - bare)]
    return AddedLatency(*(round(float(figure), 2) for figure in figures))


async def measure_delays(engine: TTS, sessions: int, seconds: float) -> list[float]:
    """Delays of a timer on the event loop while sessions speak, in milliseconds, sorted.

    Args:
        engine: A warm engine.
        sessions: Number of simultaneous pipelines.
        seconds: Duration of the conversations.
    """
    delays: list[float] = []

    async def measure() -> None:
        while True:
            due_s = time.perf_counter() + _TIMER_S
            await asyncio.sleep(_TIMER_S)
            delays.append(1000 * (time.perf_counter() - due_s))

    async def converse() -> None:
        async with run_pipeline(engine, _SAMPLING) as pipeline:
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                await pipeline.begin_turn(_TEXT)
                await pipeline.finish_turn()

    conversations = [asyncio.create_task(converse()) for _ in range(sessions)]
    await asyncio.sleep(_SETUP_S)
    timer = asyncio.create_task(measure())
    await asyncio.wait(conversations, timeout=seconds - _SETUP_S)
    timer.cancel()
    await asyncio.gather(*conversations)
    return sorted(delays)


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="demo, a folder or a hub id, instead of a simulated engine")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    if options.model is None:
        name, engine = "simulated", simulated_tts(num_slots=16, frame_seconds=_FRAME_S)
    else:
        name, engine = options.model, TTS.load(options.model, slots=options.sessions)
    with engine:
        engine.warmup()
        gc.freeze()  # as recommended for servers
        added = {
            f"after_{round(1000 * pause_s)}_ms": vars(
                asyncio.run(measure_added(engine, options.turns, pause_s))
            )
            for pause_s in _PAUSES_S
        }
        delays = asyncio.run(measure_delays(engine, options.sessions, options.seconds))
    write(
        {
            "model": name,
            "backend": engine._loaded.engine.backend.name,
            **({"frame_ms": 1000 * _FRAME_S} if options.model is None else {}),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "turns": options.turns,
            "first_audio_ms": added,
            "sessions": options.sessions,
            "seconds": options.seconds,
            "loop_late_ms": {
                "p50": round(delays[len(delays) // 2], 2),
                "p99": round(delays[len(delays) * 99 // 100], 2),
                "max": round(delays[-1], 2),
            },
        },
        options.json,
        packages=("pipecat-ai", "torch"),
    )


if __name__ == "__main__":
    main()
