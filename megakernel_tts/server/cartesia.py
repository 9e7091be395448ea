"""Cartesia's API: `/tts/websocket`, `/tts/bytes` and `/tts/sse`."""

import json
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from megakernel_tts import Finish
from megakernel_tts.server import cartesia_messages as messages
from megakernel_tts.server.cartesia_socket import CartesiaSocket
from megakernel_tts.server.encoding import AudioFormat
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import get_field, text_field
from megakernel_tts.server.http import RawBody, SpeechResponse, event, read_object
from megakernel_tts.server.reports import Caller
from megakernel_tts.server.speech_stream import SpeechChunk, SpeechStream
from megakernel_tts.server.streams import SpeechStreams

_MEDIA_TYPES = {"raw": "application/octet-stream", "wav": "audio/wav", "mp3": "audio/mpeg"}


class Cartesia:
    """The endpoints, over the streams of a server."""

    def __init__(self, streams: SpeechStreams) -> None:
        self._streams = streams

    def application(self) -> Starlette:
        """The application for the path `/tts`."""
        routes = [
            WebSocketRoute("/websocket", self._websocket),
            Route("/bytes", self._bytes, methods=["POST"]),
            Route("/sse", self._sse, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {RequestError: _error, HTTPException: _http_error}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _websocket(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await CartesiaSocket(websocket, self._streams).run()

    async def _bytes(self, request: Request) -> Response:
        fields = await read_object(request)
        audio_format, container = messages.output_format(fields, [*_MEDIA_TYPES])
        body = RawBody(audio_format, _MEDIA_TYPES[container], wav=container == "wav")
        return SpeechResponse(await self._open(request, fields, audio_format), body, {})

    async def _sse(self, request: Request) -> Response:
        fields = await read_object(request)
        audio_format, _ = messages.output_format(fields, ["raw"])
        body = _EventBody(
            request.state.request_id, words=get_field(fields, "add_timestamps", bool, False)
        )
        return SpeechResponse(await self._open(request, fields, audio_format), body, {})

    async def _open(
        self, request: Request, fields: dict[str, Any], audio_format: AudioFormat
    ) -> SpeechStream:
        text = text_field(fields, "transcript")
        speech = messages.speech_request(
            fields, self._streams, audio_format, text=text, paced=False
        )
        return await self._streams.open(speech, Caller.of(request.scope, "cartesia"))


class _EventBody:
    """Server-sent events with the messages of the WebSocket."""

    media_type = "text/event-stream"

    def __init__(self, request_id: str, *, words: bool) -> None:
        self._request_id = request_id
        self._words = words
        self._sent_s = time.monotonic()

    def begin(self) -> bytes:
        """See `AudioBody`."""
        return b""

    def encode(self, chunk: SpeechChunk) -> bytes:
        """See `AudioBody`."""
        part = b""
        if self._words and chunk.words:
            part += _event(messages.timestamps_event(chunk.words))
        if chunk.audio:
            now_s = time.monotonic()
            part += _event(messages.chunk_event(chunk, 1000 * (now_s - self._sent_s)))
            self._sent_s = now_s
        return part

    def end(self, finish: Finish, num_frames: int) -> bytes:
        """See `AudioBody`."""
        return _event(messages.done_event())

    def fail(self, error: RequestError) -> bytes:
        """See `AudioBody`."""
        return _event(messages.error_event(error, self._request_id))


def _event(message: dict[str, Any]) -> bytes:
    return event(message["type"], json.dumps(message))


async def _error(request: Request, error: RequestError) -> Response:
    content = messages.error_event(error, request.state.request_id)
    return JSONResponse(content, error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """An unknown path or method."""
    message = f"{request.method} {request.url.path}: {error.detail}."
    return await _error(request, RequestError(message, error.status_code, "http_error"))
