"""OpenAI's speech API: `/v1/audio/speech`, `/v1/audio/voices` and `/v1/models`.

Fields that vLLM-Omni, SGLang-Omni and Nari add to a request are understood as well.
"""

import json
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megakernel_tts import Finish, Voice
from megakernel_tts.server import codecs
from megakernel_tts.server.cloning import MAX_INLINE_CHARACTERS
from megakernel_tts.server.encoding import SOURCE_RATE, AudioFormat
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import (
    get_field,
    priority_of,
    pronunciations_of,
    sampling_of,
    speed_of,
    text_field,
    voice_name,
)
from megakernel_tts.server.http import (
    MAX_BODY_BYTES,
    AudioBody,
    RawBody,
    SpeechResponse,
    base64_text,
    event,
    read_object,
)
from megakernel_tts.server.openai_voices import VoiceEndpoints
from megakernel_tts.server.reports import Caller
from megakernel_tts.server.speech_stream import SpeechChunk, SpeechRequest
from megakernel_tts.server.streams import SpeechStreams

# Values of `response_format`, and their MIME types.
_SAMPLES = {"wav": "audio/wav", "pcm": "audio/pcm", "mulaw": "audio/basic"}
_TELEPHONE_RATE = 8_000
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
            *VoiceEndpoints(self._streams).routes(),
            Route("/models", self._models),
            Route("/models/{name:path}", self._model),
        ]
        handlers: dict[Any, Any] = {RequestError: _error, HTTPException: http_error}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _speech(self, request: Request) -> Response:
        caller, cloner = Caller.of(request.scope, "openai"), self._streams.cloner
        max_bytes = MAX_BODY_BYTES + (MAX_INLINE_CHARACTERS if cloner.available else 0)
        fields = await read_object(request, max_bytes)
        self._catalog.check_model(fields.get("model"))
        audio_format, media_type = _audio_format(fields)
        wants_events = _wants_events(fields, request)
        speech = SpeechRequest(
            text=_text(fields),
            language=self._catalog.language(get_field(fields, "language", str, "auto")),
            instruct=get_field(fields, "instructions", str, "")
            or get_field(fields, "instruct", str, "")
            or None,
            sampling=sampling_of(fields, self._streams.default_sampling),
            audio_format=audio_format,
            paced=False,
            speed=speed_of(fields),
            pronunciations=pronunciations_of(fields),
            priority=priority_of(fields),
            voice=await self._voice(fields, caller),  # the last one, because cloning takes time
        )
        if wants_events:
            body: AudioBody = _EventBody(len(speech.text or ""))
        else:
            body = RawBody(audio_format, media_type, wav=media_type == "audio/wav")
        headers = {"X-Sample-Rate": str(audio_format.sample_rate)}
        stream = await self._streams.open(speech, caller)
        return SpeechResponse(stream, body, headers)

    async def _voice(self, fields: dict[str, Any], caller: Caller) -> str | Voice | None:
        """The voice of a recording in the request, or of a name."""
        recording = get_field(fields, "ref_audio", str, None)
        transcript = get_field(fields, "ref_text", str, None)
        without_transcript = get_field(fields, "x_vector_only_mode", bool, False)
        if recording is None:
            name = voice_name(fields.get("voice") or fields.get("speaker"))
            return self._catalog.voice(name)
        self._streams.check_admission(caller, priority_of(fields))
        return await self._streams.cloner.clone_base64(
            recording, None if without_transcript else transcript, parameter="ref_audio"
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def _model(self, request: Request) -> Response:
        self._catalog.check_model(request.path_params["name"])
        return JSONResponse(self._describe())

    def _describe(self) -> dict[str, object]:
        name = self._catalog.model
        return {"id": name, "object": "model", "created": 0, "owned_by": "megakernel-tts"}


def _text(fields: dict[str, Any]) -> str:
    return text_field(fields, "input")


def _audio_format(fields: dict[str, Any]) -> tuple[AudioFormat, str]:
    """The format of the audio, and its MIME type."""
    name = get_field(fields, "response_format", str, "wav")
    default_rate = _TELEPHONE_RATE if name == "mulaw" else SOURCE_RATE
    rate = get_field(fields, "sample_rate", int, default_rate)
    if name in _SAMPLES:
        encoding = "pcm_mulaw" if name == "mulaw" else "pcm_s16le"
        return AudioFormat.parse(encoding, rate), _SAMPLES[name]
    codec = codecs.find(name)
    if codec is None:
        choices = ", ".join((*_SAMPLES, *codecs.NAMES))
        raise RequestError(
            f"response_format is {name!r}; choose one of {choices}.",
            400,
            "unsupported_format",
            "response_format",
        )
    audio_format = AudioFormat.compressed(codec, rate, parameter="response_format")
    return audio_format, codecs.media_type(codec)


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

    def __init__(self, num_characters: int) -> None:
        self._num_characters = num_characters

    def begin(self) -> bytes:
        """See `AudioBody`."""
        return b""

    def encode(self, chunk: SpeechChunk) -> bytes:
        """See `AudioBody`."""
        if not chunk.audio:
            return b""
        return _event({"type": "speech.audio.delta", "audio": base64_text(chunk.audio)})

    def end(self, finish: Finish, num_frames: int) -> bytes:
        """See `AudioBody`; the usage counts characters and frames."""
        usage = {
            "input_tokens": self._num_characters,
            "output_tokens": num_frames,
            "total_tokens": self._num_characters + num_frames,
        }
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
