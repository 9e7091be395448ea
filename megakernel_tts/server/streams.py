"""Streams of speech behind all protocols: admission, engine session, encoding, pace, metrics."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megakernel_tts import (
    TTS,
    AudioChunk,
    ChunkPolicy,
    Finish,
    MegakernelTTSError,
    Pronunciations,
    Sampling,
    Session,
    Voice,
    Word,
)
from megakernel_tts.server.cloning import VoiceCloner
from megakernel_tts.server.encoding import AudioFormat, Encoder
from megakernel_tts.server.errors import RequestError, request_error
from megakernel_tts.server.metrics import Metrics
from megakernel_tts.server.playback import PlaybackClock
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.voice_library import VoiceLibrary
from megakernel_tts.server.voices import Catalog

SECONDS_PER_CHARACTER = 0.07  # of ordinary speech, where only the starts of words are known

# Together at most 3 s: what an interruption discards.
_MAX_LEAD_S = 1.5  # audio of a paced stream that is sent before it is played
_CHUNKS = ChunkPolicy(first=1, largest=4, ahead=12)  # and 12 frames (1 s) made before they are sent

_MAX_BLOCKING_CHARACTERS = 1000  # longer texts are tokenised on another thread
_CONTINUOUS_S = 0.1  # underrun up to which a stream counts as continuous
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
        speed: How many times as fast as ordinary speech, from 0.5 to 2.
        pronunciations: Respellings of words, in addition to those of the server.
    """

    text: str | None
    voice: str | Voice | None
    language: str
    instruct: str | None
    sampling: Sampling
    audio_format: AudioFormat
    paced: bool
    speed: float = 1.0
    pronunciations: Pronunciations = field(default_factory=Pronunciations)


@dataclass(frozen=True)
class SpeechChunk:
    """Some consecutive audio of a stream.

    Attributes:
        audio: Encoded audio; empty only in the last chunk.
        words: Words that begin in the chunk, timed from the start of the stream.
        seconds: Duration of the audio; a codec may hold back the end of it.
    """

    audio: bytes
    words: tuple[Word, ...]
    seconds: float


Sink = Callable[[SpeechChunk], Awaitable[None]]


class SpeechStream:
    """One stream of speech. Text goes in, `deliver` sends its audio; close it in the end.

    Attributes:
        playback: The clock of a listener who hears all audio that was sent.
        num_frames: Frames (80 ms) of audio that the engine made.
    """

    def __init__(self, session: Session, request: SpeechRequest, streams: "SpeechStreams") -> None:
        """Takes over a session of the engine; `SpeechStreams.open` calls it."""
        self.playback = PlaybackClock()
        self.num_frames = 0
        self._session = session
        self._request = request
        self._streams = streams
        self._metrics = streams.metrics
        self._encoder = Encoder(request.audio_format)
        self._pending_words: tuple[Word, ...] = ()  # of chunks without a byte so far
        self._start_s = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None
        self._expired = False
        self._audio_s = 0.0
        self._closed = False
        if request.text is not None:
            self._start_deadline()

    @property
    def waiting(self) -> bool:
        """Whether it has sent no audio yet."""
        return not self._audio_s

    async def push_text(self, text: str) -> None:
        """Adds text.

        Raises:
            RequestError: It is not Unicode text, or the text was ended.
        """
        try:
            if len(text) > _MAX_BLOCKING_CHARACTERS:
                await asyncio.to_thread(self._session.push_text, text)
            else:
                self._session.push_text(text)
        except MegakernelTTSError as error:
            raise request_error(error) from None

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
        if self.waiting:
            self._expired = True
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
                    await self._send(sink, await self._encode(event.pcm), event.words)
                else:
                    self._check(event)
                    await self._send(sink, await self._encode(None), (), last=True)
                    self._observe_end(event)
                    return event
        raise AssertionError("the session ended without a finish")

    async def _encode(self, pcm: NDArray[np.int16] | None) -> bytes:
        """Encodes samples, or the end of the audio if None."""

        def encode() -> bytes:
            return self._encoder.end() if pcm is None else self._encoder.encode(pcm)

        return await asyncio.to_thread(encode) if self._encoder.blocking else encode()

    async def _send(
        self, sink: Sink, audio: bytes, words: tuple[Word, ...], *, last: bool = False
    ) -> None:
        self._pending_words += words
        if not audio and not (last and self._pending_words):
            return
        words, self._pending_words = self._pending_words, ()
        if self._request.paced:
            await self.playback.wait_until_lead(_MAX_LEAD_S)
        if audio and self.waiting:
            self._metrics.first_audio_s.observe(time.monotonic() - self._start_s)
        seconds = self._encoder.seconds - self._audio_s
        self._audio_s = self._encoder.seconds
        await self.playback.send(sink(SpeechChunk(audio, words, seconds)), seconds)

    def _check(self, finish: Finish) -> None:
        """Checks that the speech was neither cancelled nor failed."""
        if self._expired:
            self._metrics.rejected.add("timeout")
            raise RequestError(
                "The server is overloaded: no slot became free in time. Try again later.",
                503,
                "overloaded",
            )
        if finish.error is not None:
            self._metrics.finished.add("error")
            raise request_error(finish.error)
        if finish.reason == "cancelled":
            raise RequestError("The engine was closed while it spoke.", 503, "engine_closed")

    def _observe_end(self, finish: Finish) -> None:
        elapsed_s, metrics = time.monotonic() - self._start_s, self._metrics
        metrics.finished.add(_FINISHED_REASONS[finish.reason])
        metrics.latency_s.observe(elapsed_s)
        metrics.audio_s.observe(self._audio_s)
        if self._audio_s:
            metrics.real_time_factor.observe(elapsed_s / self._audio_s)
        metrics.underrun_s.observe(self.playback.underrun_s)
        if self.playback.underrun_s <= _CONTINUOUS_S:
            metrics.continuity_ok.add("100")

    def close(self) -> None:
        """Stops the speech, if it has not ended, within one frame; may be called twice."""
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
        self._metrics.cancel_s.observe(time.monotonic() - start_s)
        self._metrics.finished.add("abort")


class SpeechStreams:
    """The open streams of a server, and the admission of new ones.

    A stream is admitted while fewer are open than the engine has slots plus the queue's size; the
    engine gives them slots in the order of their arrival.

    Attributes:
        catalog: Names of the model and its voices.
        library: The cloned voices.
        cloner: Clones voices from clients' recordings.
        settings: Settings of the server.
        metrics: Metrics of the server.
        draining: Whether no stream is admitted, because the server stops.
    """

    def __init__(self, tts: TTS, settings: ServerSettings) -> None:
        """Starts without a stream.

        Args:
            tts: The engine, whose owner closes it.
            settings: Settings of the server.

        Raises:
            ValueError: The settings concern cloned voices, and the model does not clone.
            OSError: The folder of uploaded voices cannot be read.
        """
        self.cloner = VoiceCloner(tts)
        if settings.voice_dir is not None and not self.cloner.available:
            raise ValueError(
                f"A folder of voices needs a Base model, and {tts.info.name} is {tts.info.kind}; "
                "leave it out."
            )
        self.library = VoiceLibrary(settings.voices, settings.voice_dir)
        self.catalog = Catalog(tts.info, self.library)
        self.settings = settings
        self.metrics = Metrics(self.catalog.model)
        self.draining = False
        self._tts = tts
        self._streams: set[SpeechStream] = set()
        self._num_opening = 0
        self._num_websockets = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._add_gauges()

    def _add_gauges(self) -> None:
        add = self.metrics.add_gauge
        add("num_requests_running", "Streams that speak.", lambda: self.num_speaking)
        add("num_requests_waiting", "Streams without audio so far.", lambda: self.num_waiting)
        add("websocket_connections", "Open WebSockets.", lambda: self._num_websockets)
        add(
            "backlog_audio_s",
            "Seconds of audio that were sent and not yet played.",
            lambda: sum(stream.playback.lead_s for stream in self._streams),
        )

    @property
    def default_sampling(self) -> Sampling:
        """The model's sampling parameters."""
        return self._tts.sampling

    @property
    def running(self) -> bool:
        """Whether the engine can speak."""
        return self._tts.running

    @property
    def num_open(self) -> int:
        """Number of streams that the engine has not finished."""
        return len(self._streams) + self._num_opening

    @property
    def num_waiting(self) -> int:
        """Number of open streams that have sent no audio yet."""
        return sum(stream.waiting for stream in self._streams)

    @property
    def num_speaking(self) -> int:
        """Number of the other open streams."""
        return self.num_open - self.num_waiting

    @property
    def num_slots(self) -> int:
        """Number of streams that can speak at once."""
        return self._tts.slots

    @property
    def full(self) -> bool:
        """Whether no stream can be admitted until another ends."""
        return self.num_open >= self.num_slots + self.settings.max_queue

    async def open(self, request: SpeechRequest) -> SpeechStream:
        """Opens a stream, or refuses it at once.

        Raises:
            RequestError: The server is full or stops, or the request does not suit the model.
        """
        self.check_admission()
        self._num_opening += 1
        try:
            session = await self._open_session(request)
        except MegakernelTTSError as error:
            raise request_error(error) from None
        finally:
            self._num_opening -= 1
            self._changed.set()
        stream = SpeechStream(session, request, self)
        self._streams.add(stream)
        return stream

    async def _open_session(self, request: SpeechRequest) -> Session:
        pronunciations = self.settings.pronunciations
        if request.pronunciations:
            pronunciations |= request.pronunciations

        def open_session() -> Session:
            return self._tts.open(
                request.voice,
                request.language,
                request.instruct,
                sampling=request.sampling,
                chunks=_CHUNKS,
                speed=request.speed,
                pronunciations=pronunciations,
                text=request.text,
            )

        long = len(request.text or "") > _MAX_BLOCKING_CHARACTERS
        if long or isinstance(request.voice, Voice):  # prepared at its first use
            return await asyncio.to_thread(open_session)
        return open_session()

    def check_admission(self) -> None:
        """Checks that a stream can be opened now.

        Raises:
            RequestError: The server is full or stops.
        """
        if self.draining:
            self.metrics.rejected.add("draining")
            raise RequestError("The server is stopping; use another one.", 503, "draining")
        if self.full:
            self.metrics.rejected.add("overload")
            raise RequestError(
                f"The server is overloaded: {self.num_open} streams are open. Try again later.",
                429,
                "overloaded",
            )

    @contextmanager
    def websocket(self) -> Generator[None]:
        """Counts a WebSocket as open."""
        self._num_websockets += 1
        try:
            yield
        finally:
            self._num_websockets -= 1

    def release(self, stream: SpeechStream) -> None:
        """Removes a stream that has ended; called by the stream."""
        self._streams.discard(stream)
        self._changed.set()

    def release_after(self, ending: Awaitable[None], stream: SpeechStream) -> None:
        """Removes a stream once `ending` returns; called by the stream."""

        async def wait() -> None:
            await ending
            self.release(stream)

        task = asyncio.get_running_loop().create_task(wait())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def drain(self) -> None:
        """Admits no more streams and waits until all have ended, or for the drain timeout."""
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                while self.num_open:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return
