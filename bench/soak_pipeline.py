"""Parts of a pipeline for soaks: late audio, a record of what was sent, and lost callers."""

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from pipecat.frames.frames import (
    Frame,
    LLMFullResponseEndFrame,
    OutputAudioRawFrame,
    StartFrame,
    TTSAudioRawFrame,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat.utils.context.word_timestamp_tracker import WordTimestamp

from megakernel_tts import Finish
from pipecat_service import MegakernelTTSService
from pipecat_service.playhead import OUTPUT_BLOCK_S
from pipecat_service.protocol import SpeechChunk, SpeechSession
from pipecat_service.tts import SynthesizerTTSService

RATE = 24_000  # of the pipeline
_LONGEST_STALL_S = 4.0


class StallingSession:
    """A session whose events are late at random."""

    def __init__(self, session: SpeechSession, rng: random.Random, share: float) -> None:
        """Wraps a session.

        Args:
            session: The session.
            rng: Determines the stalls.
            share: Share of the events that are late.
        """
        self._session = session
        self._rng = rng
        self._share = share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def __aiter__(self) -> AsyncGenerator[SpeechChunk | Finish, None]:
        async for event in self._session:
            if self._rng.random() < self._share:
                await asyncio.sleep(self._rng.choice((0.1, _LONGEST_STALL_S)) * self._rng.random())
            yield event


def add_stalls(service: SynthesizerTTSService, rng: random.Random, share: float) -> None:
    """Makes the audio of a service late at random.

    Args:
        service: The service.
        rng: Determines the stalls.
        share: Share of the sessions' events that are late.
    """
    synthesizer = service._synthesizer
    open_session = synthesizer.open

    async def open_stalling(*args: Any) -> StallingSession:
        return StallingSession(await open_session(*args), rng, share)

    synthesizer.open = open_stalling  # type: ignore[method-assign,assignment]


@dataclass
class _SentSpeech:
    """Words and audio that were sent through an audio context."""

    words: list[float] = field(default_factory=list[float])  # starts in seconds
    num_samples: int = 0


class RecordingService(MegakernelTTSService):
    """The service, with a record of the words and the audio of a turn.

    Attributes:
        sent: Audio contexts of the turn, in the order in which they are played.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sent: dict[str, _SentSpeech] = {}

    async def create_audio_context(self, context_id: str) -> None:
        """Begins the record of a context, or continues it after Pipecat ended it by timeout."""
        self.sent.setdefault(context_id, _SentSpeech())
        await super().create_audio_context(context_id)

    async def append_to_audio_context(
        self, context_id: str | None, frame: Frame | WordTimestamp | None
    ) -> None:
        """Adds words and audio to the record."""
        speech = self.sent.get(context_id or "")
        if speech is not None and isinstance(frame, WordTimestamp):
            speech.words.append(frame.timestamp)
        elif speech is not None and isinstance(frame, TTSAudioRawFrame):
            speech.num_samples += frame.num_frames
        await super().append_to_audio_context(context_id, frame)

    def num_words_begun(self, played_s: float) -> int:
        """Number of words whose audio begins within the first seconds of the turn."""
        block = round(OUTPUT_BLOCK_S * RATE)  # the output fills up the last block of a speech
        sizes = [-(-speech.num_samples // block) * block for speech in self.sent.values()]
        starts = [0, *accumulate(sizes)]
        return sum(
            start / RATE + word < played_s - 1e-6
            for start, speech in zip(starts, self.sent.values(), strict=False)
            for word in speech.words
        )


class Output(BaseOutputTransport):
    """Takes as long for audio as it lasts, until its caller is lost.

    Attributes:
        lost: Effect of a lost caller: writing `raises` or `hangs`; None while the caller listens.
    """

    def __init__(self) -> None:
        super().__init__(
            TransportParams(
                audio_out_enabled=True, audio_out_sample_rate=RATE, audio_out_end_silence_secs=0
            )
        )
        self.lost: Literal["raises", "hangs"] | None = None
        self._num_written = 0
        self._written_at_s = 0.0

    async def start(self, frame: StartFrame) -> None:
        """Declares the output ready."""
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        """Plays a block."""
        if self.lost == "raises":
            raise ConnectionError("the caller was lost")
        if self.lost == "hangs":
            await asyncio.Event().wait()
        self._num_written += frame.num_frames
        self._written_at_s = asyncio.get_running_loop().time()
        await asyncio.sleep(frame.num_frames / frame.sample_rate)
        return True

    def clear(self) -> None:
        """Begins a turn."""
        self._num_written = 0

    async def drain(self) -> None:
        """Waits until all audio was played."""
        while self._idle_s < 2 * OUTPUT_BLOCK_S:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(OUTPUT_BLOCK_S)

    @property
    def _idle_s(self) -> float:
        """Seconds since the last block began."""
        return asyncio.get_running_loop().time() - self._written_at_s

    @property
    def played_s(self) -> float:
        """Seconds of the turn that were played."""
        return self._num_written / RATE - max(0.0, OUTPUT_BLOCK_S - self._idle_s)


class TurnEnd(FrameProcessor):
    """Signals frames behind the output.

    Attributes:
        started: Set once the pipeline has started.
        turn_ended: Set by the end of a turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Event()
        self.turn_ended = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Sets the events and passes the frame on."""
        await super().process_frame(frame, direction)
        if isinstance(frame, StartFrame):
            self.started.set()
        elif isinstance(frame, LLMFullResponseEndFrame):
            self.turn_ended.set()
        await self.push_frame(frame, direction)
