"""Runs many Pipecat turns under adverse conditions and checks what the conversations contain.

Text and audio stall at random, turns are interrupted, settings change (some to invalid values), and
callers are lost. Conversations run in virtual time: as fast as the engine and Pipecat compute.
Checked are: the service reports no error but the refusal of each invalid setting; the words
committed to a conversation are a prefix of those whose audio was played (of those whose audio was
sent, if the caller was lost), and all words of a turn that ended; nothing is left behind; memory
stays the same. The exit status is 1 if a check fails.

nice python -m bench.pipecat_soak --turns 2000 --json bench/results/pipecat-soak.json
"""

import argparse
import asyncio
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
from loguru import logger
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMAssistantAggregator
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.transcriptions.language import Language
from pipecat.workers.runner import WorkerRunner
from tqdm import tqdm

from bench.report import write
from bench.soak_pipeline import RATE, Output, RecordingService, TurnEnd, add_stalls
from bench.virtual_time import VirtualClock, observable_engines, run_in_virtual_time
from megakernel_tts import TTS, Sampling
from pipecat_service import MegakernelTTSService

_TEXTS = (
    "Yes, of course.",
    "One moment, please. I will look that up.",
    "It is ten to three.",
    "I am sorry, could you say that again?",
    "Your table is booked for two people.",
)
_NUM_CONVERSATIONS = 4  # at the same time
_TURNS_PER_PIPELINE = 25
_WORD_INTERVAL_S = 0.02
_TEXT_STALL_SHARE, _AUDIO_STALL_SHARE = 0.06, 0.15  # of words and of the engine's events
_TEXT_STALLS_S = 4.0, 4.0, 4.0, 40.0  # at most; Pipecat ends an audio context after 20 s
_UPDATE_SHARE, _INTERRUPTED_SHARE, _LOST_SHARE = 0.04, 0.5, 0.02  # of words, turns, turns
_LATEST_INTERRUPTION_S = 4.0
_TURN_TIMEOUT_S = 300  # virtual
_SETTLE_S = 0.3  # after an interruption
_NUM_MEMORY_SAMPLES = 20  # at equal distances, the last one at the end
_NUM_WARM_UP_SAMPLES = 4  # in which memory may grow
_MIN_TURNS_FOR_MEMORY = 1000  # shorter runs end while allocators warm up
_MAX_MEMORY_RANGE = 0.05
_UNSUITABLE: tuple[dict[str, Any], str] = (
    {"instruct": "Calmly."},
    "This model follows no instruction",
)
# Invalid settings, and what the service says about them.
_INVALID: tuple[tuple[dict[str, Any], str], ...] = (
    ({"voice": "unknown"}, "There is no voice 'unknown'"),
    ({"instruct": 3}, "instruct is 3"),
    ({"sampling": "greedy"}, "sampling is 'greedy'"),
    ({"speed": 9.0}, "speed is 9.0"),
    ({"pronunciations": {"two words": "x"}}, "has a space"),
)
_MAX_LISTED = 20  # violations in the report


@dataclass
class _Totals:
    """Counts of all conversations."""

    num_turns: int  # to run
    progress: tqdm
    counts: Counter[str] = field(default_factory=Counter[str])
    violations: list[str] = field(default_factory=list[str])
    played_s: float = 0.0
    rss_mb: list[float] = field(default_factory=list[float])

    def count_turn(self) -> None:
        self.counts["turns"] += 1
        self.progress.update()
        if self.counts["turns"] * _NUM_MEMORY_SAMPLES >= (len(self.rss_mb) + 1) * self.num_turns:
            gc.collect()
            self.rss_mb.append(round(psutil.Process().memory_info().rss / 1e6, 1))


class Conversation:
    """A pipeline and its driver."""

    def __init__(self, engine: TTS, rng: random.Random, totals: _Totals) -> None:
        self._rng, self._totals = rng, totals
        sampling = Sampling(seed=rng.randrange(1 << 32))
        settings = MegakernelTTSService.Settings(sampling=sampling)
        self._service = RecordingService(engine=engine, settings=settings)
        self._voices = list(engine.voices)
        self._invalid = _INVALID if engine.info.takes_instruct else (*_INVALID, _UNSUITABLE)
        self._output, self._end = Output(), TurnEnd()
        self._context = LLMContext()
        self._refusals = Counter[str]()  # that are expected, by what they say
        add_stalls(self._service, rng, _AUDIO_STALL_SHARE)
        aggregator = LLMAssistantAggregator(self._context)
        self._worker = PipelineWorker(
            Pipeline([self._service, self._output, self._end, aggregator]),
            params=PipelineParams(audio_out_sample_rate=RATE, enable_metrics=True),
            clock=VirtualClock(),
            enable_rtvi=False,
            enable_turn_tracking=False,
            cancel_on_idle_timeout=False,
        )

        @self._service.event_handler("on_error")
        async def on_error(_: FrameProcessor, error: ErrorFrame) -> None:
            expected = [part for part in self._refusals if part in error.error]
            if expected and self._refusals[expected[0]] > 0:
                self._refusals[expected[0]] -= 1
                return
            self._violate(f"error: {error.error}")

    async def run(self, turns: Iterable[int]) -> None:
        """Runs turns until they end or the caller is lost."""
        async with self._running():
            for _ in turns:
                self._totals.count_turn()
                if self._rng.random() < _LOST_SHARE:
                    await self._lose_caller()
                    return
                await self._run_turn()
            await self._worker.queue_frame(EndFrame())

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(self._worker)
        running = asyncio.create_task(runner.run())
        await self._end.started.wait()
        try:
            yield
            if not self._output.lost:
                await asyncio.wait_for(running, _TURN_TIMEOUT_S)
        finally:
            await runner.cancel()
            await running
        if any(self._refusals.values()):
            self._violate(f"invalid settings were not refused: {self._refusals}")
        contexts = self._service.get_audio_contexts()  # Pipecat keeps those of a cancelled pipeline
        if self._service._contexts or (contexts and not self._output.lost):
            self._violate("a pipeline left speech behind")

    def _begin_turn(self) -> None:
        self._output.clear()
        self._service.sent.clear()
        self._end.turn_ended.clear()
        self._context.set_messages([])

    async def _run_turn(self) -> None:
        self._begin_turn()
        text = self._rng.choice(_TEXTS)
        writer = asyncio.create_task(self._write(text.split()))
        interrupted = self._rng.random() < _INTERRUPTED_SHARE
        try:
            if interrupted:
                await asyncio.sleep(self._rng.uniform(0, _LATEST_INTERRUPTION_S))
            else:
                await asyncio.wait_for(self._end.turn_ended.wait(), _TURN_TIMEOUT_S)
                await self._output.drain()  # the frame arrives with the last word
        except TimeoutError:
            self._violate(f"a turn does not end: {text}")
        writer.cancel()
        await asyncio.wait([writer])
        interrupted = interrupted and not self._end.turn_ended.is_set()
        played_s = self._output.played_s
        num_begun = self._service.num_words_begun(played_s)
        self._totals.played_s += played_s
        if interrupted:
            self._totals.counts["interrupted"] += 1
            await self._worker.queue_frame(InterruptionFrame())
            await asyncio.sleep(_SETTLE_S)
        self._check(text, num_begun, complete=not interrupted)

    async def _write(self, words: Sequence[str]) -> None:
        """Writes a turn as a language model does, with stalls and changes of settings."""
        await self._worker.queue_frame(LLMFullResponseStartFrame())
        for word in words:
            if self._rng.random() < _TEXT_STALL_SHARE:
                self._totals.counts["text_stalls"] += 1
                await asyncio.sleep(self._rng.choice(_TEXT_STALLS_S) * self._rng.random())
            if self._rng.random() < _UPDATE_SHARE:
                await self._worker.queue_frame(TTSUpdateSettingsFrame(delta=self._new_settings()))
            await self._worker.queue_frame(LLMTextFrame(word + " "))
            await asyncio.sleep(_WORD_INTERVAL_S)
        await self._worker.queue_frame(LLMFullResponseEndFrame())

    def _new_settings(self) -> MegakernelTTSService.Settings:
        self._totals.counts["updates"] += 1
        settings, rng = MegakernelTTSService.Settings, self._rng
        kind = rng.choice(("voice", "language", "sampling", "invalid"))
        if kind == "voice":
            return settings(voice=rng.choice(self._voices))
        if kind == "language":
            return settings(language=rng.choice((Language.EN_GB, Language.SW, "klingon", None)))
        if kind == "sampling":
            return settings(sampling=Sampling(seed=rng.randrange(1 << 32)))
        invalid, sentence = rng.choice(self._invalid)
        self._refusals[sentence] += 1
        self._totals.counts["refused_updates"] += 1
        return settings(**invalid)

    def _check(self, text: str, num_begun: int, *, complete: bool) -> None:
        """Checks the words that a turn added to the conversation."""
        messages = [m["content"] for m in self._context.messages if m["role"] == "assistant"]  # type: ignore
        committed = " ".join(str(message) for message in messages).split()
        words = text.split()
        self._totals.counts["committed_words"] += len(committed)
        if committed != words[: len(committed)]:
            self._violate(f"{committed} is no prefix of {text!r}")
        if complete and committed != words:
            self._violate(f"{committed} lacks words of the whole turn {text!r}")
        if not complete and len(committed) > num_begun:
            self._violate(f"{committed} has words whose audio was not played: {num_begun} were")
        if not (complete or self._output.lost):
            self._totals.counts["played_words_not_committed"] += max(0, num_begun - len(committed))

    async def _lose_caller(self) -> None:
        """Ends the pipeline as a transport does that has lost its caller within a turn."""
        self._totals.counts["lost_callers"] += 1
        self._begin_turn()
        text = self._rng.choice(_TEXTS)
        writer = asyncio.create_task(self._write(text.split()))
        await asyncio.sleep(self._rng.uniform(0, 3))
        self._output.lost = self._rng.choice(("raises", "hangs"))
        await asyncio.sleep(self._rng.uniform(0, 3))
        writer.cancel()
        await self._worker.queue_frame(InterruptionFrame())  # has the conversation commit its words
        await asyncio.sleep(_SETTLE_S)
        self._check(text, self._service.num_words_begun(float("inf")), complete=False)
        self._refusals.clear()  # an update that was under way is lost

    def _violate(self, sentence: str) -> None:
        self._totals.violations.append(sentence)


async def _run_all(engine: TTS, totals: _Totals, seed: int) -> int:
    """Runs the conversations; returns the number of tasks that did not end."""
    indices, num_tasks = iter(range(totals.num_turns)), len(asyncio.all_tasks())

    async def converse(rng: random.Random) -> None:
        while totals.counts["turns"] < totals.num_turns:
            await Conversation(engine, rng, totals).run(islice(indices, _TURNS_PER_PIPELINE))

    await asyncio.gather(*(converse(random.Random(seed + i)) for i in range(_NUM_CONVERSATIONS)))
    await asyncio.sleep(1)  # virtual: the pipelines' last tasks end
    return len(asyncio.all_tasks()) - num_tasks


@dataclass(frozen=True)
class PipecatSoakReport:
    """Work done, checks that failed, and resources left.

    Attributes:
        counts: Turns and what happened in them.
        played_s: Seconds of audio that were played.
        seconds: Duration.
        violations: Checks that failed; the first ones.
        num_violations: Checks that failed.
        rss_mb: Resident memory at equal distances of turns.
        tasks_left: asyncio tasks that did not end.
        sessions_left: Sessions that the engine still holds.
        slots_free: Whether all slots of the backend are free.
    """

    counts: dict[str, int]
    played_s: float
    seconds: float
    violations: list[str]
    num_violations: int
    rss_mb: list[float]
    tasks_left: int
    sessions_left: int
    slots_free: bool

    @property
    def memory_range(self) -> float:
        """How much more memory was used at most than at least after the warm-up, as a fraction."""
        settled_mb = self.rss_mb[_NUM_WARM_UP_SAMPLES:]
        return max(settled_mb) / min(settled_mb) - 1 if settled_mb else 0.0

    @property
    def passed(self) -> bool:
        """Whether every check holds; memory is checked in long runs only."""
        long = self.counts["turns"] >= _MIN_TURNS_FOR_MEMORY
        changed = long and self.memory_range > _MAX_MEMORY_RANGE
        left = self.tasks_left or self.sessions_left or not self.slots_free
        return not (self.num_violations or changed or left)


def soak(engine: TTS, num_turns: int, seed: int = 0) -> PipecatSoakReport:
    """Runs turns and reports what happened.

    Args:
        engine: A warm engine, loaded within `observable_engines`.
        num_turns: How many turns to run.
        seed: Determines every turn, though not the timing within the engine.
    """
    with tqdm(total=num_turns, desc="turns", disable=None) as progress:
        totals = _Totals(num_turns, progress)
        start_s = time.perf_counter()
        timeout_s = float(num_turns * _TURN_TIMEOUT_S)
        tasks_left = run_in_virtual_time(_run_all(engine, totals, seed), timeout_s)
        seconds = time.perf_counter() - start_s
        gc.collect()
        inner = engine._loaded.engine
        return PipecatSoakReport(
            counts=dict(sorted(totals.counts.items())),
            played_s=round(totals.played_s, 1),
            seconds=round(seconds, 1),
            violations=totals.violations[:_MAX_LISTED],
            num_violations=len(totals.violations),
            rss_mb=totals.rss_mb,
            tasks_left=tasks_left,
            sessions_left=inner.num_sessions,
            slots_free=inner.num_free_slots == inner.backend.num_slots,
        )


def main() -> None:
    """Prints the report; writes it with --json. Exits with status 1 if a check fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=2000, help="default: 2000")
    parser.add_argument("--model", default="demo", help="demo (the default), a folder or a hub id")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    options = parser.parse_args()
    logger.remove()
    with observable_engines(), TTS.load(options.model, "cpu") as engine:
        engine.warmup()
        report = soak(engine, options.turns)
    content = asdict(report) | {
        "memory_range": round(report.memory_range, 4),
        "passed": report.passed,
        "threads": torch.get_num_threads(),
    }
    write(content, options.json, ("pipecat-ai", "torch"))
    sys.exit(not report.passed)


if __name__ == "__main__":
    main()
