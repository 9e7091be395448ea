"""Cartesia's WebSocket: messages to contexts, which speak at the same time."""

import time
from typing import Any

from starlette.websockets import WebSocket

from megakernel_tts import Finish
from megakernel_tts.server import cartesia_messages as messages
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import get_field, parse_object, text_field
from megakernel_tts.server.live_speech import MAX_PAUSE_S, LiveSpeech
from megakernel_tts.server.speech_socket import SpeechSocket
from megakernel_tts.server.speech_stream import SpeechChunk
from megakernel_tts.server.streams import SpeechStreams

_MAX_BUFFER_DELAY_MS = 5000
_DEFAULT_BUFFER_DELAY_MS = int(1000 * MAX_PAUSE_S)
_FIXED_FIELDS = ("model_id", "voice", "output_format", "language", "locale")  # of a context


class CartesiaSocket:
    """One connection. Messages are handled in order; contexts speak at the same time."""

    def __init__(self, websocket: WebSocket, streams: SpeechStreams) -> None:
        """Takes over a connection whose handshake was answered."""
        self._socket = SpeechSocket[_Context](websocket, streams, "cartesia")

    async def run(self) -> None:
        """Serves the connection until it closes."""
        await self._socket.run(self._handle)

    async def _handle(self, data: str) -> None:
        context_id = ""
        try:
            message = parse_object(data)
            context_id = get_field(message, "context_id", str, "")
            if not context_id:
                raise RequestError("A message needs a context_id.", parameter="context_id")
            await self._dispatch(context_id, message)
        except RequestError as error:
            if speech := self._socket.speeches.get(context_id):
                speech.cancel()
            event = messages.error_event(error, self._socket.caller.request_id)
            await self._socket.send(event | {"context_id": context_id})

    async def _dispatch(self, context_id: str, message: dict[str, Any]) -> None:
        speech = self._socket.speeches.get(context_id)
        if get_field(message, "cancel", bool, False):
            if speech is not None:
                speech.cancel()
            return
        text = text_field(message, "transcript")
        more = get_field(message, "continue", bool, False)
        at_end = not more and not text.strip()
        if speech is None:
            if at_end:
                await self._socket.send(messages.done_event() | {"context_id": context_id})
                return
            audio_format, _ = messages.output_format(message, ["raw"])
            request = messages.speech_request(
                message, self._socket.streams, audio_format, text=None, paced=True
            )
            context = _Context(self._socket, context_id, message)
            speech = self._socket.open(context_id, request, context)
        elif speech.text_ended and at_end:
            return  # the end of the text is repeated
        await _add(speech, message, text, more=more)


class _Context:
    """The events of one context; see `Listener`.

    Attributes:
        auto_flush: Whether text that pauses is spoken to its end.
    """

    def __init__(
        self, socket: "SpeechSocket[_Context]", context_id: str, message: dict[str, Any]
    ) -> None:
        """Starts without an event.

        Args:
            socket: Its connection.
            context_id: Its name.
            message: The first message, which fixes voice, language and format.
        """
        self._socket = socket
        self._id = context_id
        self._fixed = {name: message.get(name) for name in _FIXED_FIELDS}
        self._wants_words = get_field(message, "add_timestamps", bool, False)
        self._wants_details = get_field(message, "add_details", bool, False)
        self.auto_flush = get_field(message, "auto_flush", bool, True)
        self._sent_s = time.monotonic()

    def check(self, message: dict[str, Any]) -> None:
        """Checks a later message.

        Raises:
            RequestError: It changes a field that the first message has fixed.
        """
        for name, value in self._fixed.items():
            if name in message and message[name] != value:
                raise RequestError(
                    f"{name} differs from that of the context's first message.", parameter=name
                )

    async def send_chunk(self, chunk: SpeechChunk) -> None:
        """See `Listener`."""
        if chunk.words and self._wants_words:
            await self._send(messages.timestamps_event(chunk.words, details=self._wants_details))
        if chunk.audio:
            now_s = time.monotonic()
            step_ms = 1000 * (now_s - self._sent_s)
            await self._send(messages.chunk_event(chunk, step_ms, details=self._wants_details))
            self._sent_s = now_s

    async def report_flush(self, number: int) -> None:
        """See `Listener`."""
        await self._send(messages.flush_done_event(number))

    async def report_end(self, finish: Finish | None) -> None:
        """See `Listener`."""
        await self._send(messages.done_event(finish if self._wants_details else None))

    async def report_error(self, error: RequestError) -> None:
        """See `Listener`."""
        await self._send(messages.error_event(error, self._socket.caller.request_id))

    async def _send(self, event: dict[str, Any]) -> None:
        await self._socket.send(event | {"context_id": self._id})


async def _add(
    speech: LiveSpeech[_Context], message: dict[str, Any], text: str, *, more: bool
) -> None:
    """Adds the text of a message."""
    delay_ms = get_field(message, "max_buffer_delay_ms", int, _DEFAULT_BUFFER_DELAY_MS)
    if not 0 <= delay_ms <= _MAX_BUFFER_DELAY_MS:
        raise RequestError(
            f"max_buffer_delay_ms is {delay_ms}; it must be from 0 to {_MAX_BUFFER_DELAY_MS}.",
            parameter="max_buffer_delay_ms",
        )
    flush = get_field(message, "flush", bool, False) or (delay_ms == 0 and bool(text.strip()))
    speech.listener.check(message)
    await speech.add(text, whole_sentences=delay_ms == 0)
    if not more:
        await speech.end()
    elif flush:
        speech.flush()
    elif speech.listener.auto_flush:
        speech.flush_when_paused(delay_ms / 1000)
