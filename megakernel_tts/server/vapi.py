"""Vapi's custom voice, `/vapi/voice`: one text, answered with raw audio at the rate of the call."""

from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megakernel_tts import Pronunciations
from megakernel_tts.server.encoding import AudioFormat
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import (
    get_field,
    parse_object,
    priority_of,
    pronunciations_of,
    speed_of,
    text_field,
)
from megakernel_tts.server.http import RawBody, SpeechResponse, read_object
from megakernel_tts.server.keys import Priority
from megakernel_tts.server.reports import Caller
from megakernel_tts.server.speech_stream import SpeechRequest
from megakernel_tts.server.streams import SpeechStreams


class Vapi:
    """The endpoint, over the streams of a server."""

    def __init__(self, streams: SpeechStreams) -> None:
        self._streams = streams

    def application(self) -> Starlette:
        """The application for the path `/vapi`."""
        handlers: dict[Any, Any] = {RequestError: _error}
        routes = [Route("/voice", self._voice, methods=["POST"])]
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _voice(self, request: Request) -> Response:
        message = get_field(await read_object(request), "message", dict, {})
        if message.get("type") != "voice-request":
            raise RequestError("message.type must be voice-request.", parameter="type")
        audio_format = AudioFormat.parse("pcm_s16le", message.get("sampleRate", 24_000))
        catalog, query = self._streams.catalog, request.query_params
        speech = SpeechRequest(
            text=text_field(message, "text"),
            voice=catalog.voice(query.get("voice")),  # requests name none; the URL may
            language=catalog.language(query.get("language")),
            instruct=None,
            sampling=self._streams.default_sampling,
            audio_format=audio_format,
            paced=False,
            speed=_speed(query),
            pronunciations=_pronunciations(query),
            priority=priority_of(query) or Priority.LIVE,  # of a call
        )
        body = RawBody(audio_format, "audio/raw", wav=False)
        stream = await self._streams.open(speech, Caller.of(request.scope, "vapi"))
        return SpeechResponse(stream, body, {})


def _speed(query: Mapping[str, str]) -> float:
    """The speed in the URL."""
    value = query.get("speed", "1")
    try:
        speed = float(value)
    except ValueError:
        raise RequestError(
            f"speed is {value[:100]!r}; it must be a number.", parameter="speed"
        ) from None
    return speed_of({"speed": speed})


def _pronunciations(query: Mapping[str, str]) -> Pronunciations:
    """The table in the URL, a JSON object."""
    try:
        table = parse_object(query.get("pronunciations", "{}"))
    except RequestError:
        raise RequestError(
            "pronunciations must be a JSON object of words and their respellings.",
            parameter="pronunciations",
        ) from None
    return pronunciations_of({"pronunciations": table})


async def _error(_: Request, error: RequestError) -> Response:
    content = {"error": {"code": error.code, "message": error.message}}
    return JSONResponse(content, error.status, error.headers)
