"""Many conversations with barge-ins at random instants: nothing may leak, nothing may get stuck.

python -m bench.pipecat_load --json bench/results/pipecat-load.json
"""

import argparse
import asyncio
import gc
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from loguru import logger

from bench.line import Line, line
from bench.report import write
from bench.simulation import simulated_tts
from megakernel_tts import TTS

_TEXTS = (
    "Yes.",
    "One moment, please.",
    "...",
    "Well, let me see. It is ten to three.",
    "你好，世界。",
)
_LONGEST = 1.0  # seconds into a turn that a user waits before a barge-in
_SETTLED = 0.2  # the share of the turns after which memory should have stopped growing


@dataclass(frozen=True)
class Report:
    """What was seen."""

    conversations: int
    turns: int
    interrupted: int
    seconds: float
    rss_settled_mb: float
    rss_end_mb: float
    contexts_left: int
    speeches_left: int
    tasks_left: int
    sessions_left: int
    slots_free: bool

    @property
    def growth(self) -> float:
        """Growth of the resident memory after the first fifth, as a share."""
        return self.rss_end_mb / self.rss_settled_mb - 1


class Load:
    """Counts what the conversations did."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.done = 0
        self.interrupted = 0
        self.contexts_left = 0
        self.speeches_left = 0
        self.settled = 0.0

    async def converse(self, engine: TTS, turns: int, rng: random.Random) -> None:
        """One conversation."""
        async with line(engine) as call:
            for _ in range(turns):
                await self._turn(call, rng)
                self.done += 1
                if self.done == int(_SETTLED * self.turns):
                    gc.collect()
                    self.settled = psutil.Process().memory_info().rss / 1e6
            self.contexts_left += len(call.service.get_audio_contexts())
            self.speeches_left += len(call.service._speeches) + len(call.service._readers)

    async def _turn(self, call: Line, rng: random.Random) -> None:
        await call.begin(rng.choice(_TEXTS) + " ")
        if rng.random() < 0.5:
            await asyncio.wait_for(call.finish(), 30)
            return
        self.interrupted += 1
        await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, _LONGEST))))
        await asyncio.wait_for(call.interrupt(), 30)


async def _all(engine: TTS, conversations: int, turns: int, seed: int) -> tuple[Load, int]:
    """Holds the conversations; gives what they did and the tasks left over."""
    load = Load(conversations * turns)
    await asyncio.gather(
        *(load.converse(engine, turns, random.Random(seed + i)) for i in range(conversations))
    )
    await asyncio.sleep(0.2)
    return load, len(asyncio.all_tasks()) - 1


def run(engine: TTS, conversations: int, turns: int, seed: int = 0) -> Report:
    """Holds the conversations side by side and looks at what is left of them."""
    start = time.perf_counter()
    load, tasks = asyncio.run(_all(engine, conversations, turns, seed))
    seconds = time.perf_counter() - start
    gc.collect()
    inside = engine._loaded.engine
    return Report(
        conversations=conversations,
        turns=load.done,
        interrupted=load.interrupted,
        seconds=round(seconds, 1),
        rss_settled_mb=round(load.settled, 1),
        rss_end_mb=round(psutil.Process().memory_info().rss / 1e6, 1),
        contexts_left=load.contexts_left,
        speeches_left=load.speeches_left,
        tasks_left=tasks,
        sessions_left=inside.sessions,
        slots_free=inside.free == inside.backend.slots,
    )


def main() -> None:
    """Prints the report; writes it with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    with simulated_tts(slots=32, frame_seconds=0.005) as engine:
        engine.warmup()
        report = run(engine, options.conversations, options.turns)
    write(asdict(report) | {"growth": round(report.growth, 4)}, options.json)


if __name__ == "__main__":
    main()
