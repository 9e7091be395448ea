"""A connection of Wyoming's protocol: events of a client, and the audio that answers them."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event, Eventable, async_read_event, async_write_event
from wyoming.info import Attribution, Describe, Info, TtsProgram, TtsVoice
from wyoming.ping import Ping, Pong
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
)

import megakernel_tts
from megakernel_tts import Finish
from megakernel_tts.server.accounts import Account
from megakernel_tts.server.encoding import SOURCE_RATE, AudioFormat
from megakernel_tts.server.errors import RequestError, SlowClientError
from megakernel_tts.server.fields import (
    get_field,
    pronunciations_of,
    speed_of,
    text_field,
    voice_name,
)
from megakernel_tts.server.keys import Priority
from megakernel_tts.server.live_speech import LiveSpeech
from megakernel_tts.server.reports import Caller, new_request_id
from megakernel_tts.server.speech_stream import SpeechChunk, SpeechRequest
from megakernel_tts.server.streams import SpeechStreams

_log = logging.getLogger("megakernel_tts.server")

_MAX_EVENTS = 16  # that were read and not handled yet
_IDLE_S = 300.0  # without an event, after which a connection is closed
_CLOSE_TIMEOUT_S = 5.0  # in which a client must read what was sent
_ATTRIBUTION = Attribution(name="Qwen3-TTS", url="https://github.com/QwenLM/Qwen3-TTS")


class WyomingConnection:
    """One connection. Requests are answered in order; its end stops the speech."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, streams: SpeechStreams
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._streams = streams
        self._caller = Caller("wyoming", new_request_id(), Account())  # the protocol has no keys
        self._events: asyncio.Queue[Event] = asyncio.Queue(_MAX_EVENTS)
        self._live: LiveSpeech[_SpeechListener] | None = None
        self._failure: asyncio.Future[RequestError | None]
        self._failure = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serves the connection until the client closes it, or a request fails; then closes it."""
        try:
            error = await self._serve()
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if error is not None:
                    await self.send(Error(error.message, error.code))
                self._writer.close()
                await self._writer.wait_closed()
        except OSError:  # also of the timeout
            self._writer.transport.abort()
        finally:
            self._writer.close()

    async def _serve(self) -> RequestError | None:
        """Answers requests until the connection ends, and gives the error for which it does."""
        reading = asyncio.create_task(self._read())
        handling = asyncio.create_task(self._handle_all())
        try:
            await asyncio.wait(
                {reading, handling, self._failure}, return_when=asyncio.FIRST_COMPLETED
            )
            return next((end.result() for end in (handling, self._failure) if end.done()), None)
        finally:
            reading.cancel()
            handling.cancel()
            if self._live is not None:
                self._live.cancel()

    async def _read(self) -> None:
        """Reads events until the connection closes, or the client breaks the protocol."""
        # The errors are those of events whose JSON has other types than the protocol's.
        with suppress(AttributeError, EOFError, KeyError, OSError, RecursionError, TypeError):
            while (event := await async_read_event(self._reader)) is not None:
                await self._events.put(event)

    async def _handle_all(self) -> RequestError | None:
        """Answers events up to the first error, after which clients expect no more answers."""
        try:
            while True:
                async with asyncio.timeout(_IDLE_S):
                    event = await self._events.get()
                await self._handle(event)
        except RequestError as error:
            return error
        except (SlowClientError, TimeoutError):
            return None
        except Exception:
            fields = {"request_id": self._caller.request_id}
            _log.exception("A connection of Wyoming failed.", extra={"fields": fields})
            return RequestError("Internal error.", 500, "internal_error")

    async def _handle(self, event: Event) -> None:
        if not isinstance(event.data, dict):
            raise RequestError("The data of an event must be an object.", 400, "invalid_json")
        if Describe.is_type(event.type):
            await self.send(_info(self._streams))
        elif Ping.is_type(event.type):
            text = get_field(event.data, "text", str, "").encode(errors="replace").decode()
            await self.send(Pong(text or None))
        elif SynthesizeStart.is_type(event.type):
            self._start(event.data)
        elif self._live is not None:
            await self._continue(self._live, event)
        elif Synthesize.is_type(event.type):
            await self._speak(event.data)

    async def _speak(self, data: Mapping[str, Any]) -> None:
        """Speaks a whole text."""
        listener = _SpeechListener(self)
        request = _request(data, self._streams, text_field(data, "text"))
        stream = await self._streams.open(request, self._caller)
        try:
            await stream.deliver(listener.send_chunk)
        finally:
            stream.close()
        await listener.send_stop()

    def _start(self, data: Mapping[str, Any]) -> None:
        """Begins a text that arrives in portions."""
        if self._live is not None:
            raise RequestError("The text before has not ended; send synthesize-stop first.")
        self._live = LiveSpeech(
            self._streams,
            _request(data, self._streams, None),
            self._caller,
            _SpeechListener(self),
            on_close=lambda: None,
            on_slow_client=lambda: self.fail(None),
        )

    async def _continue(self, live: "LiveSpeech[_SpeechListener]", event: Event) -> None:
        """Handles an event within such a text, in which the whole text may be repeated."""
        if SynthesizeChunk.is_type(event.type):
            await live.add(get_field(event.data, "text", str, ""))
            live.flush_when_paused()
        elif SynthesizeStop.is_type(event.type):
            await live.end()
            await live.listener.ended.wait()
            self._live = None

    async def send(self, event: Eventable) -> None:
        """Sends an event; does nothing once the connection is closed."""
        if self._writer.is_closing():  # uvloop raises a RuntimeError otherwise
            return
        with suppress(OSError):
            await async_write_event(event.event(), self._writer)

    def fail(self, error: RequestError | None) -> None:
        """Ends the connection.

        Args:
            error: Is sent before; None if the client does not read.
        """
        if not self._failure.done():
            self._failure.set_result(error)


class _SpeechListener:
    """The events of one speech; see `Listener`.

    Attributes:
        ended: Set when all of it was sent.
    """

    def __init__(self, connection: WyomingConnection) -> None:
        self.ended = asyncio.Event()
        self._connection = connection
        self._format = {"rate": SOURCE_RATE, "width": 2, "channels": 1}
        self._sent_s: float | None = None

    async def send_chunk(self, chunk: SpeechChunk) -> None:
        """See `Listener`."""
        if not chunk.audio:
            return
        if self._sent_s is None:
            self._sent_s = 0.0
            await self._connection.send(AudioStart(**self._format, timestamp=0))
        self._sent_s = chunk.end_s
        start_ms = round(1000 * chunk.start_s)
        await self._connection.send(
            AudioChunk(**self._format, audio=chunk.audio, timestamp=start_ms)
        )

    async def send_stop(self) -> None:
        """Ends the audio, if there was any."""
        if self._sent_s is not None:
            await self._connection.send(AudioStop(timestamp=round(1000 * self._sent_s)))

    async def report_flush(self, number: int) -> None:
        """See `Listener`; the protocol has no flush."""

    async def report_end(self, finish: Finish | None) -> None:
        """See `Listener`."""
        await self.send_stop()
        await self._connection.send(SynthesizeStopped())
        self.ended.set()

    async def report_error(self, error: RequestError) -> None:
        """See `Listener`."""
        self._connection.fail(error)


def _request(data: Mapping[str, Any], streams: SpeechStreams, text: str | None) -> SpeechRequest:
    """The speech that an event describes; speed and pronunciations are not Wyoming's."""
    if get_field(data, "text_format", str, "text") != "text":
        raise RequestError("text_format must be text.", parameter="text_format")
    voice = get_field(data, "voice", dict, {})
    return SpeechRequest(
        text=text,
        voice=streams.catalog.voice(voice_name(voice.get("name"))),
        language=streams.catalog.language(get_field(voice, "language", str, "auto")),
        instruct=None,
        sampling=streams.default_sampling,
        audio_format=AudioFormat(),
        paced=text is None,
        speed=speed_of(data),
        pronunciations=pronunciations_of(data),
        priority=Priority.LIVE,  # of a voice assistant, whose user waits
    )


def _info(streams: SpeechStreams) -> Info:
    """The description of the server and its voices."""
    catalog = streams.catalog
    voices = [
        TtsVoice(
            name=name,
            attribution=_ATTRIBUTION,
            installed=True,
            description=name,
            version=None,
            languages=catalog.language_codes(name),
        )
        for name in catalog.voices
    ]
    program = TtsProgram(
        name="megakernel-tts",
        attribution=_ATTRIBUTION,
        installed=True,
        description=f"megakernel-tts with the model {catalog.model}",
        version=megakernel_tts.__version__,
        voices=voices,
        supports_synthesize_streaming=True,
    )
    return Info(tts=[program])
