"""One stream of speech behind all protocols: engine session, encoding, pace, what became of it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megakernel_tts import (
    AudioChunk,
    Finish,
    LivePolicy,
    MegakernelTTSError,
    Pronunciations,
    Sampling,
    Voice,
    Word,
)
from megakernel_tts.server.encoding import AudioEncoder, AudioFormat
from megakernel_tts.server.engine import SpeechSession, TextLayout
from megakernel_tts.server.errors import (
    RequestError,
    SlowClientError,
    overload_error,
    request_error,
)
from megakernel_tts.server.keys import Priority
from megakernel_tts.server.playback import PlaybackClock
from megakernel_tts.server.reports import SpeechReport

if TYPE_CHECKING:
    from megakernel_tts.server.streams import SpeechStreams

SECONDS_PER_CHARACTER = 0.07  # of ordinary speech, where only the starts of words are known

_LIVE = LivePolicy()

_FINISHED_REASONS = {"eos": "stop", "length": "length", "guard": "length"}


@dataclass(frozen=True, kw_only=True)
class SpeechRequest:
    """What is to be spoken, and how.

    Attributes:
        text: The whole text; None if it is still being written.
        voice: A voice of the model.
        language: A language of the model, or `auto`.
        instruct: An instruction, or None.
        sampling: Sampling parameters.
        audio_format: Format of the audio.
        paced: Whether audio is sent at the pace of playback, for a listener that may interrupt.
        layout: Where the text goes in the prompt, as in `TTS.open`.
        first_frames: Frames of the first chunk, at most as many as of the largest one; None for
            the default.
        speed: How many times as fast as ordinary speech, from 0.5 to 2.
        pronunciations: Respellings of words, in addition to those of the server.
        priority: Its class; None for `LIVE` if it is paced, else `PREFETCH`.
    """

    text: str | None
    voice: str | Voice | None
    language: str
    instruct: str | None
    sampling: Sampling
    audio_format: AudioFormat
    paced: bool
    layout: TextLayout = "auto"
    first_frames: int | None = None
    speed: float = 1.0
    pronunciations: Pronunciations = field(default_factory=Pronunciations)
    priority: Priority | None = None


@dataclass(frozen=True)
class SpeechChunk:
    """Some consecutive audio of a stream.

    Attributes:
        audio: Encoded audio; empty only in the last chunk.
        words: Words that begin in the chunk, timed from the start of the stream.
        start_s: Start of the audio, in seconds from the start of the stream.
        end_s: End of the audio; a codec may hold back the end of it.
        segment: Index of the segment of the text, as in `AudioChunk`.
        is_break: Whether it is the silence of a break in the text.
        slot_wait_s: Seconds so far for which the stream waited because all slots were in use.
    """

    audio: bytes
    words: tuple[Word, ...]
    start_s: float
    end_s: float
    segment: int = 0
    is_break: bool = False
    slot_wait_s: float = 0.0


Sink = Callable[[SpeechChunk], Awaitable[None]]


class SpeechStream:
    """One stream of speech. Text goes in, `deliver` sends its audio; close it in the end.

    Attributes:
        playback: The clock of a listener who hears all audio that was sent.
        num_frames: Frames (80 ms) of audio that the engine made.
        report: What became of it so far.
    """

    def __init__(
        self,
        session: SpeechSession,
        request: SpeechRequest,
        report: SpeechReport,
        streams: "SpeechStreams",
    ) -> None:
        """Takes over a session of the engine; `SpeechStreams.open` calls it."""
        self.playback = PlaybackClock()
        self.num_frames = 0
        self.report = report
        self._session = session
        self._request = request
        self._streams = streams
        self._reporter = streams.reporter
        self._encoder = AudioEncoder(request.audio_format)
        self._pending_words: tuple[Word, ...] = ()  # of chunks without a byte so far
        self._segment = 0  # of the text, of the latest chunk
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: RequestError | None = None
        self._closed = False
        if request.text is not None:
            self._count_text(request.text)
            self._start_deadline()

    @property
    def waiting(self) -> bool:
        """Whether it has sent no audio yet."""
        return self.report.first_audio_s is None

    @property
    def can_be_refused(self) -> bool:
        """Whether it has sent no audio yet and nothing has ended it."""
        return self.waiting and self._refusal is None and not self._closed

    async def push_text(self, text: str) -> None:
        """Adds text.

        Raises:
            RequestError: It is not Unicode text, or the text was ended.
        """
        try:
            await self._session.apush_text(text)
        except MegakernelTTSError as error:
            raise request_error(error) from None
        self._count_text(text)

    def _count_text(self, text: str) -> None:
        self.report.caller.account.take_characters(len(text))
        self._reporter.text(self.report, len(text))

    def flush(self) -> None:
        """Has the text so far spoken to its end."""
        self._session.flush()
        self._start_deadline()

    def end(self) -> None:
        """Ends the text."""
        self._session.end()
        self._start_deadline()

    def _start_deadline(self) -> None:
        if self._deadline is None and self.waiting:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._streams.settings.queue_timeout_s, self._expire)

    def _expire(self) -> None:
        if self.can_be_refused:
            self.refuse(overload_error("no slot became free in time", 503, "timeout"))

    def refuse(self, error: RequestError) -> None:
        """Stops a stream that has sent no audio; `deliver` raises the error."""
        self._refusal = error
        self._session.cancel()

    async def deliver(self, sink: Sink) -> Finish:
        """Sends the audio, each chunk as soon as it exists (paced: as soon as it is due).

        Args:
            sink: Sends a chunk; returns when the transport has accepted it.

        Returns:
            The end of the stream.

        Raises:
            RequestError: The stream got no slot in time, or synthesis failed.
            SlowClientError: The client does not read its audio.
        """
        async with aclosing(aiter(self._session)) as events:
            async for event in events:
                if isinstance(event, AudioChunk):
                    self.num_frames += len(event.codes)
                    await self._send(sink, await self._encode(event.pcm), event)
                else:
                    self._check(event)
                    await self._send(sink, await self._encode(None), None)
                    self._finish(_FINISHED_REASONS[event.reason])
                    return event
        raise AssertionError("the session ended without a finish")

    async def _encode(self, pcm: NDArray[np.int16] | None) -> bytes:
        """Encodes samples, or the end of the audio if None."""

        def encode() -> bytes:
            return self._encoder.end() if pcm is None else self._encoder.encode(pcm)

        return await asyncio.to_thread(encode) if self._encoder.blocking else encode()

    async def _send(self, sink: Sink, audio: bytes, source: AudioChunk | None) -> None:
        """Sends audio, which was encoded from a chunk or, if None, at the end of the stream."""
        if source is not None:
            self._pending_words += source.words
            self._segment = source.segment
        if not audio and not (source is None and self._pending_words):
            return
        words, self._pending_words = self._pending_words, ()
        if self._request.paced:
            await self.playback.wait_until_lead(_LIVE.max_lead_s)
        if audio and self.waiting:
            self._reporter.first_audio(self.report, self._session.slot_wait_s)
        start_s, self.report.audio_s = self.report.audio_s, self._encoder.seconds
        chunk = SpeechChunk(
            audio,
            words,
            start_s,
            self.report.audio_s,
            self._segment,
            source is not None and source.is_break,
            self._session.slot_wait_s,
        )
        try:
            await self.playback.send(sink(chunk), chunk.end_s - start_s)
        except SlowClientError:
            self.report.error = "slow_client"
            raise

    def _check(self, finish: Finish) -> None:
        """Checks that the speech was neither cancelled nor failed."""
        error = self._refusal
        if error is None and finish.error is not None:
            self._streams.failures.add(finish.error, self.report.start_s)
            error = request_error(finish.error)
        if error is None and finish.reason == "cancelled":
            error = RequestError("The engine was closed while it spoke.", 503, "engine_closed")
        if error is not None:
            self._reporter.failed(self.report, error)
            raise error

    def _finish(self, outcome: str) -> None:
        self.report.underrun_s = self.playback.underrun_s
        self._reporter.finished(self.report, outcome)

    def close(self) -> None:
        """Stops the speech, if it has not ended; may be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._session.finish is None:
            self._session.cancel()
            self._streams.release_after(self._wait_for_finish(), self)
        else:
            self._streams.release(self)

    async def _wait_for_finish(self) -> None:
        """Waits until the engine has stopped the stream."""
        start_s = time.monotonic()
        async with aclosing(aiter(self._session)) as events:
            async for _ in events:
                pass
        self._streams.metrics.cancel_s.observe(time.monotonic() - start_s)
        self._finish("abort")
