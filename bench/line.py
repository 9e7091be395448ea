"""A service with a sink behind it: the least pipeline that speaks."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pipecat.frames.frames import (
    EndFrame,
    Frame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.workers.runner import WorkerRunner

from megakernel_tts import TTS, Sampling
from pipecat_service import MegakernelTTSService


class Sink(FrameProcessor):
    """The rest of the pipeline: it notes when audio comes, and drops it."""

    def __init__(self) -> None:
        super().__init__()
        self.first_audio = asyncio.Event()
        self.stopped = asyncio.Event()
        self.interrupted = asyncio.Event()
        self.at = 0.0

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Takes a frame."""
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame) and not self.first_audio.is_set():
            self.at = time.perf_counter()
            self.first_audio.set()
        elif isinstance(frame, TTSStoppedFrame):
            self.stopped.set()
        elif isinstance(frame, InterruptionFrame):
            self.interrupted.set()
        await self.push_frame(frame, direction)


@dataclass(frozen=True)
class Line:
    """One running pipeline."""

    service: MegakernelTTSService
    sink: Sink
    worker: PipelineWorker

    async def begin(self, text: str) -> None:
        """Begins a turn."""
        self.sink.first_audio.clear()
        self.sink.stopped.clear()
        await self.worker.queue_frames([LLMFullResponseStartFrame(), LLMTextFrame(text)])

    async def first_audio(self, text: str) -> float:
        """Begins a turn; gives the seconds until its first audio."""
        start = time.perf_counter()
        await self.begin(text)
        await self.sink.first_audio.wait()
        return self.sink.at - start

    async def finish(self) -> None:
        """Ends a turn's text and waits for the end of its speech."""
        await self.worker.queue_frame(LLMFullResponseEndFrame())
        await self.sink.stopped.wait()

    async def interrupt(self) -> None:
        """Barges in, and waits until the interruption has passed."""
        self.sink.interrupted.clear()
        await self.worker.queue_frame(InterruptionFrame())
        await self.sink.interrupted.wait()


@asynccontextmanager
async def line(engine: TTS, sampling: Sampling | None = None) -> AsyncIterator[Line]:
    """A pipeline for as long as the block lasts."""
    settings = MegakernelTTSService.Settings(sampling=sampling)
    service, sink = MegakernelTTSService(engine=engine, settings=settings), Sink()
    worker = PipelineWorker(
        Pipeline([service, sink]), enable_rtvi=False, cancel_on_idle_timeout=False
    )
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    yield Line(service, sink, worker)
    await worker.queue_frame(EndFrame())
    await running
