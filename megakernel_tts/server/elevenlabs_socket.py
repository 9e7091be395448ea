"""ElevenLabs' WebSockets: `multi-stream-input` with contexts, `stream-input` with one text."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.websockets import WebSocket

from megakernel_tts import Finish
from megakernel_tts.server import elevenlabs_messages as messages
from megakernel_tts.server.character_times import CharacterSpan, CharacterTimes
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import get_field, parse_object, pronunciations_of, speed_of
from megakernel_tts.server.live_speech import LiveSpeech
from megakernel_tts.server.speech_socket import SpeechSocket
from megakernel_tts.server.speech_stream import SpeechChunk
from megakernel_tts.server.streams import SpeechStreams


async def serve_socket(websocket: WebSocket, streams: SpeechStreams, *, multi: bool) -> None:
    """Serves a connection until it closes.

    Args:
        websocket: The connection; its handshake has not been answered.
        streams: The streams of the server.
        multi: Whether messages name contexts. Otherwise the connection is one text.
    """
    await websocket.accept()
    socket = SpeechSocket[_Context](websocket, streams, "elevenlabs")
    try:
        adapter = _ElevenLabsSocket(
            socket, websocket.path_params["voice_id"], websocket.query_params, multi=multi
        )
    except RequestError as error:
        await socket.refuse(error.close_code, error.message, messages.error_message(error))
    else:
        await adapter.run()


class _ElevenLabsSocket:
    """One connection. Messages are handled in order; contexts speak at the same time."""

    def __init__(
        self,
        socket: "SpeechSocket[_Context]",
        voice_id: str,
        query: Mapping[str, str],
        *,
        multi: bool,
    ) -> None:
        """Reads the parameters of the URL, which hold for all contexts.

        Raises:
            RequestError: A parameter is invalid.
        """
        self._request = messages.speech_request(voice_id, query, {}, socket.streams, text=None)
        self._max_idle_s = messages.max_idle_s(query)
        self._whole_sentences = query.get("auto_mode") == "true"
        self._synchronous = query.get("sync_alignment") == "true"
        self._socket = socket
        self._multi = multi
        self._closes = not multi  # once no context is open

    async def run(self) -> None:
        """Serves the connection."""
        if self._multi:
            await self._socket.run(self._handle_multi)
        else:
            self._open("")
            await self._socket.run(self._handle_single)

    def _open(self, context_id: str) -> "LiveSpeech[_Context]":
        context = _Context(self, context_id, synchronous=self._synchronous)
        return self._socket.open(context_id, self._request, context, max_idle_s=self._max_idle_s)

    async def _handle_single(self, data: str) -> None:
        try:
            message = parse_object(data)
            text = get_field(message, "text", str, "")
            flush = get_field(message, "flush", bool, False)
            speech = self._socket.speeches.get("")
            if speech is None or speech.text_ended:
                return
            if message.get("text") == "" and not flush:
                await speech.end()
            else:
                await self._add(speech, message, text, flush=flush)
        except RequestError as error:
            await self._fail("", error)

    async def _handle_multi(self, data: str) -> None:
        context_id = ""
        try:
            message = parse_object(data)
            context_id = get_field(message, "context_id", str, "")
            context_id = context_id or get_field(message, "contextId", str, "")
            if not self._closes:
                await self._dispatch(context_id, message)
        except RequestError as error:
            await self._fail(context_id, error)

    async def _dispatch(self, context_id: str, message: dict[str, Any]) -> None:
        if get_field(message, "close_socket", bool, False):
            await self._close_all()
            return
        speech = self._socket.speeches.get(context_id)
        if get_field(message, "close_context", bool, False):
            if speech is not None:
                await self._close(context_id, speech)
            return
        text = get_field(message, "text", str, "")
        flush = get_field(message, "flush", bool, False)
        if speech is None:
            if not text:
                return  # keeps the connection alive
            speech = self._open(context_id)
        if not text and (not flush or speech.text_ended):
            speech.keep_alive()
        else:
            await self._add(speech, message, text, flush=flush)

    async def _add(
        self, speech: "LiveSpeech[_Context]", message: dict[str, Any], text: str, *, flush: bool
    ) -> None:
        if settings := get_field(message, "voice_settings", dict, {}):
            speech.request = replace(speech.request, speed=speed_of(settings))
        if "pronunciations" in message:
            speech.request = replace(speech.request, pronunciations=pronunciations_of(message))
        await speech.add(text, whole_sentences=self._whole_sentences)
        has_text = bool(text.strip())
        if has_text or flush:
            speech.listener.flushed = flush
        if flush or (has_text and self._whole_sentences):
            speech.flush()
        else:
            speech.flush_when_paused()

    async def _close(self, context_id: str, speech: "LiveSpeech[_Context]") -> None:
        """Closes a context: the protocol finishes text that was flushed, and no other.

        Clients flush at the end of a turn but not for an interruption. Pipecat closes a context
        again when it is interrupted after its end.
        """
        if speech.listener.flushed and not speech.text_ended:
            await speech.end()
        else:
            speech.cancel()
            await self.send(context_id, messages.final_message())

    async def _close_all(self) -> None:
        self._closes = True
        for context_id, speech in [*self._socket.speeches.items()]:
            if not speech.text_ended:
                await self._close(context_id, speech)
        self.on_end()

    def on_end(self) -> None:
        """Closes the connection if the client requested it and no context is open."""
        if self._closes and not self._socket.speeches:
            self._socket.close()

    async def _fail(self, context_id: str, error: RequestError) -> None:
        """Ends a context with an error."""
        if speech := self._socket.speeches.get(context_id):
            speech.cancel()
        await self.report(context_id, error)

    async def report(self, context_id: str, error: RequestError) -> None:
        """Reports the error with which a context ended."""
        await self.send(context_id, messages.error_message(error))
        if self._multi:
            self.on_end()
        else:
            self._socket.close(error)

    async def send(self, context_id: str, message: dict[str, Any]) -> None:
        """Sends a message of a context."""
        await self._socket.send(message | ({"contextId": context_id} if context_id else {}))


class _Context:
    """The messages of one context; see `Listener`.

    Attributes:
        flushed: Whether the client has flushed its text so far.
    """

    def __init__(self, socket: _ElevenLabsSocket, context_id: str, *, synchronous: bool) -> None:
        """Starts without a message.

        Args:
            socket: Its connection.
            context_id: Its name; may be empty.
            synchronous: See `messages.audio_message`.
        """
        self.flushed = False
        self._socket = socket
        self._id = context_id
        self._synchronous = synchronous
        self._times = CharacterTimes()

    async def send_chunk(self, chunk: SpeechChunk) -> None:
        """See `Listener`."""
        await self._send(chunk.audio, self._times.add(chunk))

    async def report_flush(self, number: int) -> None:
        """See `Listener`; the protocol has no such message."""

    async def report_end(self, finish: Finish | None) -> None:
        """See `Listener`."""
        if (rest := self._times.end()).characters:
            await self._send(b"", rest)
        await self._socket.send(self._id, messages.final_message())
        self._socket.on_end()

    async def report_error(self, error: RequestError) -> None:
        """See `Listener`."""
        await self._socket.report(self._id, error)

    async def _send(self, audio: bytes, span: CharacterSpan) -> None:
        message = messages.audio_message(audio, span, synchronous=self._synchronous)
        await self._socket.send(self._id, message)
