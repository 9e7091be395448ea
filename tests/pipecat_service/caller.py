"""A caller without a microphone: audio in real time to the recognition service and a user's turns.

It runs in virtual time (`bench.virtual_time`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from pipecat.audio.turn.base_turn_analyzer import BaseTurnAnalyzer, BaseTurnParams, EndOfTurnState
from pipecat.audio.vad.vad_analyzer import VADAnalyzer, VADParams
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    StartFrame,
    TranscriptionFrame,
    UserStoppedSpeakingFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.metrics.metrics import MetricsData
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import (
    LLMContextAggregatorPair,
    LLMUserAggregatorParams,
)
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.turns.user_stop import TurnAnalyzerUserTurnStopStrategy
from pipecat.turns.user_turn_strategies import UserTurnStrategies
from pipecat.workers.runner import WorkerRunner

from bench.virtual_time import VirtualClock, run_in_virtual_time
from megakernel_stt import STT
from pipecat_service import MegakernelSTTService
from tests.pipecat_service.bot import VIRTUAL_TIMEOUT_S, Recorder

PACKET_S = 0.02
_LOUD = 50  # of 32767, on average


class LevelVAD(VADAnalyzer):
    """Hears speech where audio is loud."""

    def __init__(self) -> None:
        super().__init__(params=VADParams(min_volume=0.0))

    def num_frames_required(self) -> int:
        return round(self.sample_rate * PACKET_S)

    def voice_confidence(self, buffer: bytes) -> float:
        return float(np.abs(np.frombuffer(buffer, np.int16).astype(int)).mean() > _LOUD)


class ScriptedTurns(BaseTurnAnalyzer):
    """Decides at each end of speech whether the turn is complete: by a list, then always."""

    def __init__(self, complete: Sequence[bool]) -> None:
        super().__init__()
        self._complete = list(complete)

    @property
    def speech_triggered(self) -> bool:
        return False

    @property
    def params(self) -> BaseTurnParams:
        return BaseTurnParams()

    def append_audio(self, buffer: bytes, is_speech: bool) -> EndOfTurnState:
        return EndOfTurnState.INCOMPLETE

    async def analyze_end_of_turn(self) -> tuple[EndOfTurnState, MetricsData | None]:
        complete = self._complete.pop(0) if self._complete else True
        return EndOfTurnState.COMPLETE if complete else EndOfTurnState.INCOMPLETE, None

    def clear(self) -> None:
        """Has no state."""


class Caller:
    """A pipeline of the service, a recorder and the user's aggregator.

    Attributes:
        rate: Sample rate of the pipeline.
        stt: The service under test.
        context: The conversation.
        errors: Errors that the service reported.
        worker: Runs the pipeline.
    """

    def __init__(
        self,
        engine: STT | None,
        *,
        rate: int = 16_000,
        vad: bool = True,
        turns: Sequence[bool] = (),
        **service: object,
    ) -> None:
        """Builds the pipeline.

        Args:
            engine: For the service; None if `service` names a model.
            rate: Sample rate of the pipeline.
            vad: Whether it has a voice activity detector.
            turns: See `ScriptedTurns`.
            **service: Further arguments of the service.
        """
        self.rate = rate
        self.stt = MegakernelSTTService(engine=engine, **service)  # type: ignore[arg-type]
        self.errors: list[ErrorFrame] = []
        self.context = LLMContext()
        self._changed = asyncio.Event()
        self._results, self._user_turns = Recorder(self._changed.set), Recorder(self._changed.set)
        stop = TurnAnalyzerUserTurnStopStrategy(turn_analyzer=ScriptedTurns(turns))
        pair = LLMContextAggregatorPair(
            self.context,
            user_params=LLMUserAggregatorParams(
                vad_analyzer=LevelVAD() if vad else None,
                user_turn_strategies=UserTurnStrategies(stop=[stop]),
            ),
        )
        self.worker = PipelineWorker(
            Pipeline([self.stt, self._results, pair.user(), self._user_turns]),
            params=PipelineParams(
                audio_in_sample_rate=rate, enable_metrics=True, enable_usage_metrics=True
            ),
            clock=VirtualClock(),
            enable_rtvi=False,
            cancel_on_idle_timeout=False,
        )

        @self.stt.event_handler("on_error")
        async def on_error(_: FrameProcessor, error: ErrorFrame) -> None:
            self.errors.append(error)
            self._changed.set()

    @property
    def results(self) -> list[tuple[float, InterimTranscriptionFrame | TranscriptionFrame]]:
        """Interim and final results, each with the time in seconds."""
        return [
            (at, frame)
            for at, frame in self._results.frames
            if isinstance(frame, InterimTranscriptionFrame | TranscriptionFrame)
        ]

    @property
    def finals(self) -> list[TranscriptionFrame]:
        return [frame for _, frame in self.results if isinstance(frame, TranscriptionFrame)]

    @property
    def interims(self) -> list[InterimTranscriptionFrame]:
        return [frame for _, frame in self.results if isinstance(frame, InterimTranscriptionFrame)]

    def times_of(self, kind: type) -> list[float]:
        """Times in seconds of frames that pass the recognised results, or those of turns."""
        vad = VADUserStartedSpeakingFrame | VADUserStoppedSpeakingFrame | UserStoppedSpeakingFrame
        recorder = self._user_turns if issubclass(kind, vad) else self._results
        return [at for at, frame in recorder.frames if isinstance(frame, kind)]

    def frames_of(self, kind: type) -> list:
        """Frames of a kind that the service sent."""
        return [frame for _, frame in self._results.frames if isinstance(frame, kind)]

    @property
    def said(self) -> list[str]:
        """The user's messages in the conversation."""
        return [str(m["content"]) for m in self.context.messages if m["role"] == "user"]  # type: ignore[index]

    async def play(self, *parts: NDArray[np.int16]) -> None:
        """Sends audio in packets of 20 ms, each when it was spoken."""
        pcm, size = np.concatenate(parts), round(PACKET_S * self.rate)
        for start in range(0, len(pcm), size):
            packet = pcm[start : start + size]
            await self.worker.queue_frame(InputAudioRawFrame(packet.tobytes(), self.rate, 1))
            await asyncio.sleep(len(packet) / self.rate)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on frames and errors."""
        async with asyncio.timeout(VIRTUAL_TIMEOUT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def run(self, drive: Callable[["Caller"], Awaitable[None]]) -> None:
        """Runs the pipeline; `drive` acts as the user."""
        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(self.worker)
        running = asyncio.create_task(runner.run())
        try:
            await self.wait_until(lambda: bool(self.times_of(StartFrame)))
            await drive(self)
            await self.worker.queue_frame(EndFrame())
            await asyncio.wait_for(running, VIRTUAL_TIMEOUT_S)
        finally:
            await runner.cancel()
            await running


def run_calls(callers: Sequence[Caller], *drives: Callable[[Caller], Awaitable[None]]) -> None:
    """Runs calls side by side in one event loop, in virtual time.

    Args:
        callers: The calls.
        *drives: Act as the users; the last one also for the callers that follow.
    """

    async def run_all() -> None:
        runs = (c.run(drives[min(i, len(drives) - 1)]) for i, c in enumerate(callers))
        await asyncio.gather(*runs)

    run_in_virtual_time(run_all(), 3 * VIRTUAL_TIMEOUT_S)
