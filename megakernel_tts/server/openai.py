"""OpenAI's speech API: `/v1/audio/speech`, `/v1/audio/voices` and `/v1/models`."""

import json
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megakernel_tts import Finish
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import get_field
from megakernel_tts.server.http import (
    AudioBody,
    RawBody,
    SpeechResponse,
    base64_text,
    event,
    read_object,
)
from megakernel_tts.server.openai_batch import BatchEndpoint
from megakernel_tts.server.openai_requests import WAV, max_body_bytes, speech_request, usage_of
from megakernel_tts.server.openai_voices import VoiceEndpoints
from megakernel_tts.server.reports import Caller
from megakernel_tts.server.speech_stream import SpeechChunk
from megakernel_tts.server.streams import SpeechStreams
from megakernel_tts.server.word_times import TimedSpeechResponse, describe_words

_ERROR_TYPES = {429: "rate_limit_error"}


class OpenAI:
    """The endpoints, over the streams of a server."""

    def __init__(self, streams: SpeechStreams) -> None:
        self._streams = streams
        self._catalog = streams.catalog

    def application(self) -> Starlette:
        """The application for the path `/v1`."""
        routes = [
            Route("/audio/speech", self._speech, methods=["POST"]),
            Route("/audio/speech/batch", BatchEndpoint(self._streams).speak, methods=["POST"]),
            *VoiceEndpoints(self._streams).routes(),
            Route("/models", self._models),
            Route("/models/{name:path}", self._model),
        ]
        handlers: dict[Any, Any] = {RequestError: _error, HTTPException: http_error}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _speech(self, request: Request) -> Response:
        caller = Caller.of(request.scope, "openai")
        fields = await read_object(request, max_body_bytes(self._streams))
        wants_events = _wants_events(fields, request)
        wants_words = get_field(fields, "word_timestamps", bool, False)
        speech, media_type = await speech_request(fields, self._streams, caller)
        if wants_events:
            body: AudioBody = _EventBody(len(speech.text or ""), words=wants_words)
        else:
            body = RawBody(speech.audio_format, media_type, wav=media_type == WAV)
        headers = {"X-Sample-Rate": str(speech.audio_format.sample_rate)}
        held = wants_words and not wants_events  # until the header has all words
        reply = TimedSpeechResponse if held else SpeechResponse
        return reply(await self._streams.open(speech, caller), body, headers)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def _model(self, request: Request) -> Response:
        self._catalog.check_model(request.path_params["name"])
        return JSONResponse(self._describe())

    def _describe(self) -> dict[str, object]:
        name = self._catalog.model
        return {"id": name, "object": "model", "created": 0, "owned_by": "megakernel-tts"}


def _wants_events(fields: dict[str, Any], request: Request) -> bool:
    """Whether the reply is a stream of events: `stream_format` decides, else `Accept`.

    The field `stream` does not: servers disagree on whether it selects events or raw audio.
    """
    stream_format = get_field(fields, "stream_format", str, "")
    if stream_format not in ("", "audio", "sse"):
        raise RequestError(
            f"stream_format is {stream_format!r}; choose audio or sse.", parameter="stream_format"
        )
    if stream_format:
        return stream_format == "sse"
    return "text/event-stream" in request.headers.get("accept", "")


class _EventBody:
    """Server-sent events with the audio in base64."""

    media_type = "text/event-stream"

    def __init__(self, num_characters: int, *, words: bool) -> None:
        """Prepares the events.

        Args:
            num_characters: Length of the text.
            words: Whether events have the words that begin in their audio.
        """
        self._num_characters = num_characters
        self._words = words

    def begin(self) -> bytes:
        """See `AudioBody`."""
        return b""

    def encode(self, chunk: SpeechChunk) -> bytes:
        """See `AudioBody`."""
        words = chunk.words if self._words else ()
        if not (chunk.audio or words):
            return b""
        data: dict[str, object] = {"type": "speech.audio.delta", "audio": base64_text(chunk.audio)}
        return _event(data | ({"timestamps": describe_words(words)} if words else {}))

    def end(self, finish: Finish, num_frames: int) -> bytes:
        """See `AudioBody`; the usage counts characters and frames."""
        usage = usage_of(self._num_characters, num_frames)
        return _event({"type": "speech.audio.done", "usage": usage})

    def fail(self, error: RequestError) -> bytes:
        """See `AudioBody`."""
        return _event({"type": "speech.audio.error", "error": _describe_error(error)})


def _event(data: dict[str, object]) -> bytes:
    return event(str(data["type"]), json.dumps(data))


def _describe_error(error: RequestError) -> dict[str, object]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "message": error.message,
        "type": _ERROR_TYPES.get(error.status, kind),
        "param": error.parameter or None,
        "code": error.code,
    }


async def _error(_: Request, error: RequestError) -> Response:
    return JSONResponse({"error": _describe_error(error)}, error.status, error.headers)


async def http_error(request: Request, error: HTTPException) -> Response:
    """The reply to an unknown path or method."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path}: {error.detail}."
    return await _error(request, RequestError(message, error.status_code, code))
