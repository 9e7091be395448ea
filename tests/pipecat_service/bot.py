"""A conversation without a network: a scripted language model, the service, a paced output.

It runs in virtual time (`bench.virtual_time`).
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    FunctionCallFromLLM,
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
from pipecat.processors.aggregators.llm_response_universal import (
    LLMContextAggregatorPair,
    LLMUserAggregatorParams,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import LLMService
from pipecat.services.settings import LLMSettings
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat.turns.user_stop import SpeechTimeoutUserTurnStopStrategy
from pipecat.turns.user_turn_strategies import UserTurnStrategies
from pipecat.workers.runner import WorkerRunner

from bench.virtual_time import VirtualClock, run_in_virtual_time
from megakernel_tts import TTS
from pipecat_service import MegakernelTTSService
from pipecat_service.remote import MegakernelRemoteTTSService
from pipecat_service.tts import SynthesizerTTSService
from tests.pipecat_service.serving import URL, serving

F = TypeVar("F", bound=Frame)
M = TypeVar("M", bound=MetricsData)
Reply = Sequence[str | Frame | FunctionCallFromLLM | float]

VIRTUAL_TIMEOUT_S = 60.0  # for an event that a test waits for
_LOUD = 1000  # of 32767: above the silence between words


def spaced_words(text: str) -> list[str]:
    """The words of a text, each with a space after it."""
    return [f"{word} " for word in text.split()]


def leading_spaces(text: str) -> list[str]:
    """The words of a text, each with the space before it."""
    return re.findall(r"\s*\S+", text)


class ScriptedLLM(LLMService):
    """Writes prepared replies: text token by token, frames as they are, numbers as pauses.

    It makes function calls as other services do.

    Attributes:
        times_s: Time in seconds of each token.
    """

    def __init__(
        self,
        replies: Sequence[Reply],
        word_interval_s: float,
        tokenize: Callable[[str], list[str]],
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepares replies.

        Args:
            replies: In order.
            word_interval_s: Seconds per word, divided among the tokens.
            tokenize: Divides a text into tokens.
            on_token: Called after each token.
        """
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
        self.times_s: list[float] = []
        self._word_interval_s = word_interval_s
        self._tokenize = tokenize
        self._on_token = on_token

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
            if isinstance(part, int | float):
                await asyncio.sleep(part)
                continue
            if isinstance(part, FunctionCallFromLLM):
                call = replace(part, context=frame.context)
                await self.run_function_calls([call])
                continue
            tokens = self._tokenize(part)
            for token in tokens:
                await asyncio.sleep(self._word_interval_s * len(part.split()) / len(tokens))
                self.times_s.append(asyncio.get_running_loop().time())
                await self.push_frame(LLMTextFrame(token))
                self._on_token()
        await self.push_frame(LLMFullResponseEndFrame())


class PacedOutput(BaseOutputTransport):
    """Takes as long for audio as it lasts, as a loudspeaker does.

    Attributes:
        chunks: Played audio, each chunk with the time in seconds at which it began.
        num_loud: Samples of them that are louder than the silence between words.
    """

    def __init__(self, rate: int, on_change: Callable[[], None]) -> None:
        super().__init__(
            TransportParams(
                audio_out_enabled=True, audio_out_sample_rate=rate, audio_out_end_silence_secs=0
            )
        )
        self.chunks: list[tuple[float, NDArray[np.int16]]] = []
        self.num_loud = 0
        self._on_change = on_change

    async def start(self, frame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        pcm = np.frombuffer(frame.audio, np.int16)
        self.chunks.append((asyncio.get_running_loop().time(), pcm))
        self.num_loud += int(np.count_nonzero(np.abs(pcm) > _LOUD))
        self._on_change()
        await asyncio.sleep(len(pcm) / frame.sample_rate)
        return True

    def clear(self) -> None:
        """Discards the audio that was played so far."""
        self.chunks.clear()
        self.num_loud = 0

    @property
    def pcm(self) -> NDArray[np.int16]:
        """int16 [samples], everything that was played."""
        return np.concatenate([np.zeros(0, np.int16), *(pcm for _, pcm in self.chunks)])


class Recorder(FrameProcessor):
    """Keeps frames that pass downstream, each with the time in seconds.

    Attributes:
        frames: The frames.
        num_ends: Ends of responses among them.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        super().__init__()
        self.frames: list[tuple[float, Frame]] = []
        self.num_ends = 0
        self._on_change = on_change

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if direction is FrameDirection.DOWNSTREAM:
            self.frames.append((asyncio.get_running_loop().time(), frame))
            self.num_ends += isinstance(frame, LLMFullResponseEndFrame)
            self._on_change()
        await self.push_frame(frame, direction)


class Bot:
    """One pipeline.

    Attributes:
        remote: Whether the services use servers; set for all bots.
        engine: The engine of the service or its server.
        tts: The service under test.
        llm: The language model.
        context: The conversation.
        output: The loudspeaker.
        errors: Errors that the service reported.
        timeout_s: Virtual time after which an event that does not occur fails the test.
    """

    remote: ClassVar = False

    def __init__(
        self,
        engine: TTS | None,
        *replies: str | Reply,
        rate: int = 24_000,
        word_interval_s: float = 0.005,
        tokenize: Callable[[str], list[str]] = spaced_words,
        tracing: bool = False,
        timeout_s: float = VIRTUAL_TIMEOUT_S,
        **service: object,
    ) -> None:
        """Builds the pipeline.

        Args:
            engine: For the service; None if `service` names a model.
            *replies: Of the language model, in order.
            rate: Sample rate of the pipeline.
            word_interval_s: Between two words of the language model.
            tokenize: Divides a text of the language model into tokens.
            tracing: Whether the pipeline is traced.
            timeout_s: See the class.
            **service: Further arguments of the service.
        """
        self.engine = engine
        self.tts: SynthesizerTTSService
        if self.remote:
            self.tts = MegakernelRemoteTTSService(url=URL, **service)  # type: ignore[arg-type]
        else:
            self.tts = MegakernelTTSService(engine=engine, **service)  # type: ignore[arg-type]
        self.timeout_s = timeout_s
        self.context = LLMContext(messages=[{"role": "user", "content": "Hello?"}])
        self.output = PacedOutput(rate, self._notify)
        self.errors: list[ErrorFrame] = []
        self._changed = asyncio.Event()
        self._sent, self._played = Recorder(self._notify), Recorder(self._notify)
        # The user says nothing: the default strategy would load a model for each bot.
        strategies = UserTurnStrategies(stop=[SpeechTimeoutUserTurnStopStrategy()])
        pair = LLMContextAggregatorPair(
            self.context, user_params=LLMUserAggregatorParams(user_turn_strategies=strategies)
        )
        prepared = [[reply] if isinstance(reply, str) else reply for reply in replies]
        self.llm = llm = ScriptedLLM(prepared, word_interval_s, tokenize, self._notify)
        pipeline = Pipeline(
            [pair.user(), llm, self.tts, self._sent, self.output, self._played, pair.assistant()]
        )
        self.worker = PipelineWorker(
            pipeline,
            params=PipelineParams(
                audio_out_sample_rate=rate, enable_metrics=True, enable_usage_metrics=True
            ),
            clock=VirtualClock(),
            enable_rtvi=False,
            enable_tracing=tracing,
            cancel_on_idle_timeout=False,
        )

        @self.tts.event_handler("on_error")
        async def on_error(_: FrameProcessor, error: ErrorFrame) -> None:
            self.errors.append(error)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()

    @property
    def sent(self) -> list[Frame]:
        """Frames in the order in which the service sent them, the language model's included."""
        return [frame for _, frame in self._sent.frames]

    @property
    def played(self) -> list[Frame]:
        """Frames as they leave the output."""
        return [frame for _, frame in self._played.frames]

    @property
    def said(self) -> list[str]:
        """The bot's messages in the conversation."""
        messages: list[Any] = [*self.context.messages]
        return [m["content"] for m in messages if m["role"] == "assistant" and "content" in m]

    @property
    def played_speech_s(self) -> float:
        """Seconds of played audio that are not silence."""
        return self.output.num_loud / self.output.sample_rate

    def metrics(self, kind: type[M]) -> list[M]:
        """Metrics of a kind that the service sent."""
        frames = [frame for frame in self.sent if isinstance(frame, MetricsFrame)]
        return [data for frame in frames for data in frame.data if isinstance(data, kind)]

    def frames_of(self, kind: type[F]) -> list[F]:
        """Frames of a kind that the service sent."""
        return [frame for frame in self.sent if isinstance(frame, kind)]

    def timed_frames_of(self, kind: type[F]) -> list[tuple[float, F]]:
        """Frames of exactly a kind that the service sent, with their times in seconds."""
        return [(at, frame) for at, frame in self._sent.frames if type(frame) is kind]

    def played_of(self, kind: type[F]) -> list[F]:
        """Frames of a kind that left the output."""
        return [frame for frame in self.played if isinstance(frame, kind)]

    def first_time_of(self, kind: type[Frame]) -> float:
        """Time in seconds at which the service first sent a frame of a kind."""
        return next(at for at, frame in self._sent.frames if isinstance(frame, kind))

    def times_of(self, kind: type[Frame]) -> list[float]:
        """Times in seconds at which frames of a kind left the output."""
        return [at for at, frame in self._played.frames if isinstance(frame, kind)]

    async def request_reply(self) -> None:
        """Makes the language model reply."""
        await self.worker.queue_frame(LLMRunFrame())

    async def interrupt(self, settle_s: float = 0.3) -> None:
        """Interrupts the bot.

        Args:
            settle_s: Time for the interruption to take effect.
        """
        await self.worker.queue_frame(InterruptionFrame())
        await asyncio.sleep(settle_s)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on frames, tokens, audio and errors."""
        async with asyncio.timeout(self.timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def reply(self) -> None:
        """Makes the language model reply, and waits until the reply has been played to its end."""
        num_before = self._played.num_ends
        await self.request_reply()
        await self.wait_until(lambda: self._played.num_ends > num_before)

    async def run(self, drive: Callable[["Bot"], Awaitable[None]], *, end: bool = True) -> None:
        """Runs the pipeline.

        Args:
            drive: Acts as the user.
            end: Whether to end the pipeline afterwards; otherwise it is cancelled.
        """
        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(self.worker)
        running = asyncio.create_task(runner.run())
        try:
            await self.wait_until(lambda: bool(self.played_of(StartFrame)))
            await drive(self)
            if end:
                await self.worker.queue_frame(EndFrame())
                await asyncio.wait_for(running, VIRTUAL_TIMEOUT_S)
        finally:
            await runner.cancel()
            await running


def run_conversations(
    bots: Sequence[Bot], drive: Callable[[Bot], Awaitable[None]], *, end: bool = True
) -> None:
    """Runs conversations side by side in one event loop, in virtual time.

    Each remote service has a server of its own.

    Args:
        bots: The conversations.
        drive: Acts as the user.
        end: Whether to end the pipelines afterwards; otherwise they are cancelled.
    """

    async def run_one(bot: Bot) -> None:
        if not bot.remote:
            await bot.run(drive, end=end)
            return
        assert bot.engine is not None, "a test that names a model has no server"
        async with serving(bot.engine):
            await bot.run(drive, end=end)

    async def run_all() -> None:
        await asyncio.gather(*(run_one(bot) for bot in bots))

    run_in_virtual_time(run_all(), 3 * max(bot.timeout_s for bot in bots))
