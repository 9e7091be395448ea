"""Runs many conversations with random interruptions and reports what they leave behind.

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

from bench.report import write
from bench.running_pipeline import RunningPipeline, run_pipeline
from bench.simulation import simulated_tts
from megakernel_tts import TTS

_TEXTS = (
    "Yes.",
    "One moment, please.",
    "...",
    "Well, let me see. It is ten to three.",
    "你好，世界。",
)
_FRAME_S = 0.005  # duration of a frame in the simulated engine
_MAX_DELAY_S = 1.0  # from the start of a turn to its interruption
_TURN_TIMEOUT_S = 30
_WARM_UP_SHARE = 0.2  # of the turns, after which memory should no longer grow
_CLEAN_UP_S = 0.2  # in which the pipelines' last tasks end


@dataclass(frozen=True)
class LoadReport:
    """Work done and resources left.

    Attributes:
        conversations: Simultaneous conversations.
        turns: Turns of all conversations.
        interrupted: Turns that were interrupted.
        seconds: Duration.
        rss_settled_mb: Resident memory after the warm-up share of the turns.
        rss_end_mb: Resident memory at the end.
        contexts_left: Audio contexts that the services still hold.
        speeches_left: Speeches and readers that the services still hold.
        tasks_left: asyncio tasks that did not end.
        sessions_left: Sessions that the engine still holds.
        slots_free: Whether all slots of the backend are free.
    """

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
        """Growth of resident memory after the warm-up share, as a fraction."""
        return self.rss_end_mb / self.rss_settled_mb - 1


class _Conversations:
    """Runs conversations and counts turns and leftovers."""

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns
        self.num_done = 0
        self.interrupted = 0
        self.contexts_left = 0
        self.speeches_left = 0
        self.rss_settled_mb = 0.0

    async def converse(self, engine: TTS, turns: int, rng: random.Random) -> None:
        """Runs one conversation."""
        async with run_pipeline(engine) as pipeline:
            for _ in range(turns):
                await self._run_turn(pipeline, rng)
                self.num_done += 1
                if self.num_done == int(_WARM_UP_SHARE * self.num_turns):
                    gc.collect()
                    self.rss_settled_mb = psutil.Process().memory_info().rss / 1e6
            service = pipeline.service
            self.contexts_left += len(service.get_audio_contexts())
            self.speeches_left += len(service._contexts)

    async def _run_turn(self, pipeline: RunningPipeline, rng: random.Random) -> None:
        await pipeline.begin_turn(rng.choice(_TEXTS) + " ")
        if rng.random() < 0.5:
            await asyncio.wait_for(pipeline.finish_turn(), _TURN_TIMEOUT_S)
            return
        self.interrupted += 1
        delay_s = rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, _MAX_DELAY_S)))
        await asyncio.sleep(delay_s)
        await asyncio.wait_for(pipeline.interrupt(), _TURN_TIMEOUT_S)


async def _run_all(
    engine: TTS, num_conversations: int, turns: int, seed: int
) -> tuple[_Conversations, int]:
    """Runs the conversations.

    Returns:
        Their counts, and the number of tasks that did not end.
    """
    conversations = _Conversations(num_conversations * turns)
    await asyncio.gather(
        *(
            conversations.converse(engine, turns, random.Random(seed + i))
            for i in range(num_conversations)
        )
    )
    await asyncio.sleep(_CLEAN_UP_S)
    return conversations, len(asyncio.all_tasks()) - 1


def run(engine: TTS, conversations: int, turns: int, seed: int = 0) -> LoadReport:
    """Runs simultaneous conversations and reports what they leave behind.

    Args:
        engine: A warm engine.
        conversations: Simultaneous conversations.
        turns: Turns of each.
        seed: Determines texts and interruptions.
    """
    start_s = time.perf_counter()
    result, tasks_left = asyncio.run(_run_all(engine, conversations, turns, seed))
    seconds = time.perf_counter() - start_s
    gc.collect()
    inner = engine._loaded.engine
    return LoadReport(
        conversations=conversations,
        turns=result.num_done,
        interrupted=result.interrupted,
        seconds=round(seconds, 1),
        rss_settled_mb=round(result.rss_settled_mb, 1),
        rss_end_mb=round(psutil.Process().memory_info().rss / 1e6, 1),
        contexts_left=result.contexts_left,
        speeches_left=result.speeches_left,
        tasks_left=tasks_left,
        sessions_left=inner.num_sessions,
        slots_free=inner.num_free_slots == inner.backend.num_slots,
    )


def main() -> None:
    """Prints the report; writes it with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=20, help="of each conversation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    options = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    with simulated_tts(num_slots=32, frame_seconds=_FRAME_S) as engine:
        engine.warmup()
        report = run(engine, options.conversations, options.turns)
    write(asdict(report) | {"growth": round(report.growth, 4)}, options.json)


if __name__ == "__main__":
    main()
