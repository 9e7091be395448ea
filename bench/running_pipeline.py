"""The smallest Pipecat pipeline that speaks: the service, then a sink."""

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
    """Stands for the rest of a pipeline.

    Attributes:
        first_audio: Set by the first audio frame of a turn.
        first_audio_at_s: `time.perf_counter` at that frame.
        stopped: Set by the end of the turn's speech.
        interrupted: Set by an interruption.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_audio = asyncio.Event()
        self.first_audio_at_s = 0.0
        self.stopped = asyncio.Event()
        self.interrupted = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Sets the events and passes the frame on."""
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame) and not self.first_audio.is_set():
            self.first_audio_at_s = time.perf_counter()
            self.first_audio.set()
        elif isinstance(frame, TTSStoppedFrame):
            self.stopped.set()
        elif isinstance(frame, InterruptionFrame):
            self.interrupted.set()
        await self.push_frame(frame, direction)


@dataclass(frozen=True)
class RunningPipeline:
    """A pipeline that runs: service, sink and the worker that feeds them."""

    service: MegakernelTTSService
    sink: Sink
    worker: PipelineWorker

    async def begin_turn(self, text: str) -> None:
        """Starts a turn with its first text."""
        self.sink.first_audio.clear()
        self.sink.stopped.clear()
        await self.worker.queue_frames([LLMFullResponseStartFrame(), LLMTextFrame(text)])

    async def time_first_audio(self, text: str) -> float:
        """Starts a turn and returns the seconds until its first audio frame."""
        start_s = time.perf_counter()
        await self.begin_turn(text)
        await self.sink.first_audio.wait()
        return self.sink.first_audio_at_s - start_s

    async def finish_turn(self) -> None:
        """Ends the turn's text and waits for the end of its speech."""
        await self.worker.queue_frame(LLMFullResponseEndFrame())
        await self.sink.stopped.wait()

    async def interrupt(self) -> None:
        """Interrupts the turn and waits until the interruption reaches the sink."""
        self.sink.interrupted.clear()
        await self.worker.queue_frame(InterruptionFrame())
        await self.sink.interrupted.wait()


@asynccontextmanager
async def run_pipeline(
    engine: TTS, sampling: Sampling | None = None
) -> AsyncIterator[RunningPipeline]:
    """Runs a pipeline for the duration of the `async with` block."""
    settings = MegakernelTTSService.Settings(sampling=sampling)
    service, sink = MegakernelTTSService(engine=engine, settings=settings), Sink()
    worker = PipelineWorker(
        Pipeline([service, sink]), enable_rtvi=False, cancel_on_idle_timeout=False
    )
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    yield RunningPipeline(service, sink, worker)
    await worker.queue_frame(EndFrame())
    await running
