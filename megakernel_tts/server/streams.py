"""The open streams of a server: admission of new ones, and what all of them share."""

import asyncio
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from megakernel_tts import ChunkPolicy, LivePolicy, MegakernelTTSError, Sampling
from megakernel_tts.server.cloning import VoiceCloner
from megakernel_tts.server.engine import SpeechEngine, SpeechSession
from megakernel_tts.server.errors import RequestError, overload_error, request_error
from megakernel_tts.server.failures import FailureLog
from megakernel_tts.server.keys import Priority
from megakernel_tts.server.metrics import Metrics
from megakernel_tts.server.reports import Caller, Reporter, SpeechReport
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.speech_stream import SpeechRequest, SpeechStream
from megakernel_tts.server.voice_library import VoiceLibrary
from megakernel_tts.server.voices import Catalog

if TYPE_CHECKING:
    from megakernel_tts.server.tracing import Tracing

_LIVE = LivePolicy()
# For clients that take audio as it is made: larger chunks take less of the server's time.
_UNPACED_CHUNKS = ChunkPolicy(largest=8, ahead=24)


class SpeechStreams:
    """The open streams of a server, and the admission of new ones.

    A stream is admitted while fewer are open than the engine has slots plus the queue's size. The
    engine gives them slots by priority, and of one priority in the order of their arrival. A stream
    for which the queue has no space replaces the last one of the lowest priority below its own.

    Attributes:
        catalog: Names of the model and its voices.
        library: The cloned voices.
        cloner: Clones voices from clients' recordings.
        settings: Settings of the server.
        metrics: Metrics of the server.
        reporter: Writes what became of each request.
        failures: The log of failed streams.
        draining: Whether no stream is admitted, because the server stops.
    """

    def __init__(
        self, tts: SpeechEngine, settings: ServerSettings, tracing: "Tracing | None" = None
    ) -> None:
        """Starts without a stream.

        Args:
            tts: The engine, whose owner closes it.
            settings: Settings of the server.
            tracing: Receives spans of each request; None for no traces.

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
        self.reporter = Reporter(self.metrics, tracing)
        self.failures = FailureLog()
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
        add("frame_step_s", "Seconds of a frame, predicted.", lambda: self._tts.frame_step_s)

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
        return sum(stream.waiting for stream in self._streams) + self._num_opening

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

    async def open(self, request: SpeechRequest, caller: Caller) -> SpeechStream:
        """Opens a stream, or refuses it at once.

        Args:
            request: What is to be spoken.
            caller: Who requests it.

        Raises:
            RequestError: A limit of the key is reached, the server is full or stops, or the request
                does not suit the model.
        """
        default = Priority.LIVE if request.paced else Priority.PREFETCH
        priority = caller.account.priority(request.priority, default)
        voice = self.catalog.name_of(request.voice)
        report = SpeechReport(caller=caller, voice=voice, priority=priority)
        try:
            self._admit(report, len(request.text or ""))
            stream = await self._open_admitted(request, report)
        except RequestError as error:
            self.reporter.failed(report, error)
            raise
        self.reporter.accepted(report)
        return stream

    async def _open_admitted(self, request: SpeechRequest, report: SpeechReport) -> SpeechStream:
        """Opens a stream, which counts as open before the engine has it."""
        account = report.caller.account
        account.open_stream()
        self._num_opening += 1
        try:
            session = await self._open_session(request, report.priority)
        except BaseException as error:
            account.close_stream()
            if isinstance(error, MegakernelTTSError):
                raise request_error(error) from None
            raise
        finally:
            self._num_opening -= 1
            self._changed.set()
        stream = SpeechStream(session, request, report, self)
        self._streams.add(stream)
        return stream

    async def _open_session(self, request: SpeechRequest, priority: Priority) -> SpeechSession:
        pronunciations = self.settings.pronunciations
        if request.pronunciations:
            pronunciations |= request.pronunciations
        chunks = _LIVE.chunks if request.paced else _UNPACED_CHUNKS
        if request.first_frames is not None:
            chunks = replace(chunks, first=min(request.first_frames, chunks.largest))
        return await self._tts.aopen(
            request.voice,
            request.language,
            request.instruct,
            layout=request.layout,
            sampling=request.sampling,
            chunks=chunks,
            speed=request.speed,
            pronunciations=pronunciations,
            text=request.text,
            priority=priority,
        )

    def check_admission(self, caller: Caller, priority: Priority | None = None) -> None:
        """Checks, before work for a request that is not paced, that its stream could be opened now.

        Args:
            caller: Who requests it.
            priority: The class that the request names, if any.

        Raises:
            RequestError: As `open`.
        """
        report = SpeechReport(
            caller=caller, voice="", priority=caller.account.priority(priority, Priority.PREFETCH)
        )
        try:
            self._check(report, num_characters=0)
        except RequestError as error:
            self.reporter.failed(report, error)
            raise

    def _check(self, report: SpeechReport, num_characters: int) -> None:
        """Checks the limits of the key and of the server."""
        report.caller.account.check(num_characters)
        if self.draining:
            message = "The server is stopping; use another one."
            raise RequestError(message, 503, "draining", reason="draining")
        if self.full and not self._below(report.priority):
            raise overload_error(f"{self.num_open} streams are open", 429, "overload")

    def _below(self, priority: Priority) -> list[SpeechStream]:
        """The streams of lower priority that have sent no audio."""
        return [s for s in self._streams if s.report.priority > priority and s.can_be_refused]

    def _admit(self, report: SpeechReport, num_characters: int) -> None:
        """Checks the limits; if the server is full, refuses the last stream of lower priority.

        That one stays open until the engine has stopped it.
        """
        self._check(report, num_characters)
        if self.full:
            lower = self._below(report.priority)
            last = max(lower, key=lambda stream: (stream.report.priority, stream.report.start_s))
            last.refuse(overload_error("more urgent requests have arrived", 429, "overload"))

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
        stream.report.caller.account.close_stream()
        self._changed.set()

    def release_after(self, completion: Awaitable[None], stream: SpeechStream) -> None:
        """Removes a stream once `completion` returns; called by the stream."""

        async def wait() -> None:
            await completion
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
