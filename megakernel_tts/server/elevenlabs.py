"""ElevenLabs' API: `/v1/text-to-speech/{voice_id}` and its WebSockets, `/v1/voices`."""

import json
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

from megakernel_tts import Finish
from megakernel_tts.server import elevenlabs_messages as messages
from megakernel_tts.server.character_times import CharacterSpan, CharacterTimes
from megakernel_tts.server.elevenlabs_socket import serve_socket
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import text_field
from megakernel_tts.server.http import Base64Text, RawBody, SpeechResponse, read_object
from megakernel_tts.server.reports import Caller
from megakernel_tts.server.speech_stream import SpeechChunk, SpeechStream
from megakernel_tts.server.streams import SpeechStreams


class ElevenLabs:
    """The endpoints, over the streams of a server."""

    def __init__(self, streams: SpeechStreams) -> None:
        self._streams = streams

    def routes(self) -> list[BaseRoute]:
        """Its routes; `/v1/models` and the rest of `/v1` are OpenAI's."""
        routes = [
            Route("/{voice_id}", self._audio, methods=["POST"]),
            Route("/{voice_id}/stream", self._audio, methods=["POST"]),
            Route("/{voice_id}/with-timestamps", self._timed_audio, methods=["POST"]),
            Route("/{voice_id}/stream/with-timestamps", self._timed_stream, methods=["POST"]),
            WebSocketRoute("/{voice_id}/stream-input", self._single),
            WebSocketRoute("/{voice_id}/multi-stream-input", self._multi),
        ]
        handlers: dict[Any, Any] = {RequestError: _error, HTTPException: _http_error}
        return [
            Mount("/v1/text-to-speech", Starlette(routes=routes, exception_handlers=handlers)),
            Route("/v1/voices", self._voices),
            Route("/v2/voices", self._voices),
        ]

    async def _audio(self, request: Request) -> Response:
        audio_format, media_type = messages.output_format(request.query_params)
        body = RawBody(audio_format, media_type, wav=False)
        return SpeechResponse(await self._open(request), body, {})

    async def _timed_audio(self, request: Request) -> Response:
        return SpeechResponse(await self._open(request), _ObjectBody(), {})

    async def _timed_stream(self, request: Request) -> Response:
        return SpeechResponse(await self._open(request), _LinesBody(), {})

    async def _open(self, request: Request) -> SpeechStream:
        fields = await read_object(request)
        speech = messages.speech_request(
            request.path_params["voice_id"],
            request.query_params,
            fields,
            self._streams,
            text=text_field(fields, "text"),
        )
        return await self._streams.open(speech, Caller.of(request.scope, "elevenlabs"))

    async def _single(self, websocket: WebSocket) -> None:
        await serve_socket(websocket, self._streams, multi=False)

    async def _multi(self, websocket: WebSocket) -> None:
        await serve_socket(websocket, self._streams, multi=True)

    async def _voices(self, _: Request) -> Response:
        voices = [
            {"voice_id": name, "name": name, "category": "premade"}
            for name in self._streams.catalog.voices
        ]
        total = {"has_more": False, "total_count": len(voices)}  # of /v2/voices
        return JSONResponse({"voices": voices} | total)


class _ObjectBody:
    """One JSON object, with all audio in base64 before the times of characters.

    It is sent while it is made, so that the audio of a long text is not kept in memory.
    """

    media_type = "application/json"

    def __init__(self) -> None:
        self._times = CharacterTimes()
        self._spans: list[CharacterSpan] = []
        self._text = Base64Text()

    def begin(self) -> bytes:
        """See `AudioBody`."""
        return b'{"audio_base64": "'

    def encode(self, chunk: SpeechChunk) -> bytes:
        """See `AudioBody`."""
        self._spans.append(self._times.add(chunk))
        return self._text.add(chunk.audio)

    def end(self, finish: Finish, num_frames: int) -> bytes:
        """See `AudioBody`."""
        span = CharacterSpan.join([*self._spans, self._times.end()])
        times = json.dumps(messages.alignments(span))
        return self._text.end() + f'", {times[1:]}'.encode()

    def fail(self, error: RequestError) -> bytes:
        """See `AudioBody`; an object that has begun cannot hold an error."""
        return b""


class _LinesBody:
    """One JSON object in each line, with audio in base64 and the times of characters."""

    media_type = "application/json"

    def __init__(self) -> None:
        self._times = CharacterTimes()

    def begin(self) -> bytes:
        """See `AudioBody`."""
        return b""

    def encode(self, chunk: SpeechChunk) -> bytes:
        """See `AudioBody`."""
        return _line(messages.timed_audio(chunk.audio, self._times.add(chunk)))

    def end(self, finish: Finish, num_frames: int) -> bytes:
        """See `AudioBody`."""
        rest = self._times.end()
        return _line(messages.timed_audio(b"", rest)) if rest.characters else b""

    def fail(self, error: RequestError) -> bytes:
        """See `AudioBody`; the protocol has no message of an error."""
        return b""


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def _error(_: Request, error: RequestError) -> Response:
    return JSONResponse(messages.error_body(error), error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """An unknown path or method."""
    message = f"{request.method} {request.url.path}: {error.detail}."
    return await _error(request, RequestError(message, error.status_code, "http_error"))
