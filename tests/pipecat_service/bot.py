"""A conversation without a network: a scripted language model, the service, a real-time output."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMRunFrame,
    LLMTextFrame,
    MetricsFrame,
    OutputAudioRawFrame,
    StartFrame,
)
from pipecat.metrics.metrics import MetricsData
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import LLMService
from pipecat.services.settings import LLMSettings
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

from megakernel_tts import TTS
from pipecat_service import MegakernelTTSService

F = TypeVar("F", bound=Frame)
M = TypeVar("M", bound=MetricsData)
Reply = Sequence[str | Frame]

PATIENCE = 60.0  # seconds until a test takes it that nothing comes any more
_BUFFER = 0.02  # seconds that a loudspeaker holds, and which may be late without a gap


class ScriptedLLM(LLMService):
    """Writes prepared replies: text word by word, frames as they are."""

    def __init__(self, replies: Sequence[Reply], delay: float) -> None:
        super().__init__(
            settings=LLMSettings(
                model="scripted",
                system_instruction=None,
                temperature=None,
                max_tokens=None,
                top_p=None,
                top_k=None,
                frequency_penalty=None,
                presence_penalty=None,
                seed=None,
                filter_incomplete_user_turns=None,
                user_turn_completion_config=None,
            )
        )
        self._replies = list(replies)
        self._delay = delay

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if not isinstance(frame, LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        await self.push_frame(LLMFullResponseStartFrame())
        for part in self._replies.pop(0):
            if isinstance(part, Frame):
                await self.push_frame(part)
                continue
            for word in part.split():
                await asyncio.sleep(self._delay)
                await self.push_frame(LLMTextFrame(word + " "))
        await self.push_frame(LLMFullResponseEndFrame())


class RealTimeOutput(BaseOutputTransport):
    """Takes as long for audio as it lasts, as a loudspeaker does.

    Attributes:
        chunks: What was played, each with the time at which it began.
        late: Seconds of silence because this process woke too late: words run ahead of the sound
            by as much. Whoever hands audio over late is not excused by it.
    """

    def __init__(self, rate: int) -> None:
        super().__init__(
            TransportParams(
                audio_out_enabled=True, audio_out_sample_rate=rate, audio_out_end_silence_secs=0
            )
        )
        self.chunks: list[tuple[float, NDArray[np.int16]]] = []
        self.late = 0.0
        self._free = 0.0  # when the loudspeaker has played all

    async def start(self, frame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        begin = max(time.monotonic(), self._free)
        self.chunks.append((begin, np.frombuffer(frame.audio, np.int16)))
        self._free = begin + len(frame.audio) / 2 / frame.sample_rate
        await asyncio.sleep(max(0.0, self._free - _BUFFER - time.monotonic()))
        self.late += max(0.0, time.monotonic() - self._free)
        return True

    @property
    def pcm(self) -> NDArray[np.int16]:
        return np.concatenate([np.zeros(0, np.int16), *(pcm for _, pcm in self.chunks)])


class Recorder(FrameProcessor):
    """Keeps what passes downstream."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if direction is FrameDirection.DOWNSTREAM:
            self.frames.append(frame)
        await self.push_frame(frame, direction)


class Bot:
    """One pipeline.

    Attributes:
        errors: That the service reported.
        sent: Frames in the order in which the service sent them, the language model's included.
        played: Frames as they leave the output.
    """

    def __init__(
        self,
        engine: TTS | None,
        *replies: str | Reply,
        rate: int = 24_000,
        delay: float = 0.005,
        tracing: bool = False,
        **service: object,
    ) -> None:
        self.tts = MegakernelTTSService(engine=engine, **service)  # type: ignore[arg-type]
        self.context = LLMContext(messages=[{"role": "user", "content": "Hello?"}])
        self.output = RealTimeOutput(rate)
        self.errors: list[ErrorFrame] = []
        self._sent, self._played = Recorder(), Recorder()
        pair = LLMContextAggregatorPair(self.context)
        llm = ScriptedLLM([[r] if isinstance(r, str) else r for r in replies], delay)
        pipeline = Pipeline(
            [pair.user(), llm, self.tts, self._sent, self.output, self._played, pair.assistant()]
        )
        self.worker = PipelineWorker(
            pipeline,
            params=PipelineParams(
                audio_out_sample_rate=rate, enable_metrics=True, enable_usage_metrics=True
            ),
            enable_rtvi=False,
            enable_tracing=tracing,
            cancel_on_idle_timeout=False,
        )

        @self.tts.event_handler("on_error")
        async def on_error(_: FrameProcessor, error: ErrorFrame) -> None:
            self.errors.append(error)

    @property
    def sent(self) -> list[Frame]:
        return self._sent.frames

    @property
    def played(self) -> list[Frame]:
        return self._played.frames

    @property
    def said(self) -> list[str]:
        """What the conversation holds of the bot, a message each."""
        return [m["content"] for m in self.context.messages if m["role"] == "assistant"]  # type: ignore

    def metrics(self, kind: type[M]) -> list[M]:
        frames = [f for f in self.sent if isinstance(f, MetricsFrame)]
        return [data for f in frames for data in f.data if isinstance(data, kind)]

    def of(self, kind: type[F]) -> list[F]:
        """Frames of a kind that the service sent."""
        return [frame for frame in self.sent if isinstance(frame, kind)]

    async def ask(self) -> None:
        """Lets the language model reply."""
        await self.worker.queue_frame(LLMRunFrame())

    async def interrupt(self) -> None:
        """The user begins to speak."""
        await self.worker.queue_frame(InterruptionFrame())

    async def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Waits until something holds."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def _count(self, kind: type[Frame]) -> int:
        return sum(isinstance(frame, kind) for frame in self.played)

    async def replies(self, count: int, seconds: float = PATIENCE) -> None:
        """Waits until so many replies have been played to their ends."""
        await self.until(lambda: self._count(LLMFullResponseEndFrame) >= count, seconds)

    async def run(self, drive: Callable[["Bot"], Awaitable[None]], *, end: bool = True) -> None:
        """Runs the pipeline while `drive` plays the user, then ends it."""
        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(self.worker)
        running = asyncio.create_task(runner.run())
        try:
            await self.until(lambda: any(isinstance(f, StartFrame) for f in self.played))
            await drive(self)
            if end:
                await self.worker.queue_frame(EndFrame())
                await asyncio.wait_for(running, PATIENCE)
        finally:
            await runner.cancel()
            await running


def hold(bots: Sequence[Bot], drive: Callable[[Bot], Awaitable[None]]) -> None:
    """Holds conversations side by side in one event loop."""

    async def all_of_them() -> None:
        await asyncio.gather(*(bot.run(drive) for bot in bots))

    asyncio.run(asyncio.wait_for(all_of_them(), 3 * PATIENCE))
