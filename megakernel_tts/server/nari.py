"""Nari's WebSocket, `/v1/audio/speech/ws`: one request, whose text arrives in portions."""

from typing import Any

from starlette.websockets import WebSocket

from megakernel_tts import Finish
from megakernel_tts.server.encoding import SOURCE_RATE, AudioFormat
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import (
    get_field,
    parse_object,
    priority_of,
    pronunciations_of,
    sampling_of,
    speed_of,
    text_field,
    voice_name,
)
from megakernel_tts.server.live_speech import LiveSpeech
from megakernel_tts.server.speech_socket import SpeechSocket
from megakernel_tts.server.speech_stream import SpeechChunk, SpeechRequest
from megakernel_tts.server.streams import SpeechStreams

_PROTOCOL = "nari.speech.v1"
_PROTOCOL_ERROR = 1002  # code of a close frame
_AUDIO = {"encoding": "pcm_s16le", "sample_rate": SOURCE_RATE, "channels": 1}


class Nari:
    """The endpoint, over the streams of a server."""

    def __init__(self, streams: SpeechStreams) -> None:
        self._streams = streams

    async def serve(self, websocket: WebSocket) -> None:
        """Serves a connection; its subprotocol must be Nari's."""
        offered = _PROTOCOL in websocket.scope["subprotocols"]
        await websocket.accept(_PROTOCOL if offered else None)
        socket = SpeechSocket[_Request](websocket, self._streams, "nari")
        if offered:
            await _Request(socket).run()
        else:
            await socket.refuse(_PROTOCOL_ERROR, f"The subprotocol {_PROTOCOL} is needed.")


class _Request:
    """The request of one connection, and its messages; see `Listener`."""

    def __init__(self, socket: "SpeechSocket[_Request]") -> None:
        self._socket = socket
        self._id = socket.caller.request_id
        self._speech: LiveSpeech[_Request] | None = None
        self._next_sequence = 0
        self._started = False  # the response
        self._num_chunks = 0

    async def run(self) -> None:
        """Serves the connection until it closes."""
        await self._socket.send({"type": "session.created", "protocol": _PROTOCOL, "audio": _AUDIO})
        await self._socket.run(self._handle)

    async def _handle(self, data: str) -> None:
        try:
            await self._dispatch(parse_object(data))
        except RequestError as error:
            await self.report_error(error)

    async def _dispatch(self, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "request.start":
            await self._configure(message)
        elif self._speech is None:
            raise RequestError("The first message must be request.start.", 400, "invalid_request")
        elif kind == "input_text.append":
            self._check_sequence(message)
            await self._speech.add(text_field(message, "text"))
            self._speech.flush_when_paused()
            await self._acknowledge(message)
        elif kind == "input_text.end":
            self._check_sequence(message)
            await self._acknowledge(message)
            await self._speech.end()
        elif kind == "response.cancel":
            self._speech.cancel()
            await self._finish("cancelled")
        else:
            raise RequestError(f"There is no message {kind!r}.", 400, "unknown_event", "type")

    async def _configure(self, message: dict[str, Any]) -> None:
        if self._speech is not None:
            raise RequestError("A connection has one request.", 400, "invalid_request")
        if get_field(message, "response_format", str, "pcm") != "pcm":
            raise RequestError("response_format must be pcm.", parameter="response_format")
        streams = self._socket.streams
        streams.catalog.check_model(message.get("model"))
        request = SpeechRequest(
            text=None,
            voice=streams.catalog.voice(voice_name(message.get("voice"))),
            language=streams.catalog.language(get_field(message, "language", str, "auto")),
            instruct=get_field(message, "instruct", str, "") or None,
            sampling=sampling_of(message, streams.default_sampling),
            audio_format=AudioFormat(),
            paced=True,
            speed=speed_of(message),
            pronunciations=pronunciations_of(message),
            priority=priority_of(message),
        )
        self._speech = self._socket.open(self._id, request, self)
        await self._socket.send({"type": "request.configured"})

    def _check_sequence(self, message: dict[str, Any]) -> None:
        if message.get("sequence") != self._next_sequence:
            raise RequestError(
                f"sequence is {message.get('sequence')!r}; it must be {self._next_sequence}.",
                400,
                "invalid_sequence",
                "sequence",
            )
        self._next_sequence += 1

    async def _acknowledge(self, message: dict[str, Any]) -> None:
        sequence = message["sequence"]
        await self._send("input_text.ack", event=message["type"], sequence=sequence)

    async def send_chunk(self, chunk: SpeechChunk) -> None:
        """See `Listener`; the protocol has no times of words."""
        await self._start()
        if chunk.audio:
            await self._socket.send(chunk.audio)
            self._num_chunks += 1

    async def report_flush(self, number: int) -> None:
        """See `Listener`; the protocol has no flush."""

    async def report_end(self, finish: Finish | None) -> None:
        """See `Listener`."""
        await self._start()  # of a text without words
        await self._finish("stop")

    async def report_error(self, error: RequestError) -> None:
        """See `Listener`."""
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        details = {"type": kind, "code": error.code, "message": error.message}
        await self._send("error", error=details)
        self._socket.close(error)

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self._send("response.started", audio=_AUDIO)

    async def _finish(self, stop_reason: str) -> None:
        await self._send("response.done", stop_reason=stop_reason, audio_chunks=self._num_chunks)
        self._socket.close()

    async def _send(self, kind: str, **fields: object) -> None:
        await self._socket.send({"type": kind, "request_id": self._id, **fields})
