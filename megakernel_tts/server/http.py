"""HTTP requests and replies: bounded bodies, audio that is streamed, identifiers of requests."""

import asyncio
import base64
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Protocol

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megakernel_tts import Finish
from megakernel_tts.server.connections import close_incomplete
from megakernel_tts.server.encoding import AudioFormat, wav_header
from megakernel_tts.server.errors import RequestError, SlowClientError
from megakernel_tts.server.fields import parse_object
from megakernel_tts.server.reports import new_request_id
from megakernel_tts.server.speech_stream import SpeechChunk, SpeechStream

MAX_BODY_BYTES = 1 << 20
_MAX_FIELDS_BYTES = 1 << 16  # of a form, without its file
_BODY_TIMEOUT_S = 30.0


async def read_object(request: Request, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """Reads the JSON object in a request's body.

    Args:
        request: The request.
        max_bytes: Maximum size of the body.

    Raises:
        RequestError: It is too large, too slow, or no JSON object.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in _parts(request, max_bytes):
                body += part
    except TimeoutError:
        raise _late_body() from None
    return parse_object(bytes(body))


async def read_form(request: Request, max_file_bytes: int) -> FormData:
    """Reads a form with at most one file (`multipart/form-data`). The caller closes it.

    Args:
        request: The request.
        max_file_bytes: Maximum size of the file.

    Raises:
        RequestError: It is too large, too slow, or no such form.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise RequestError("The request must be a form: multipart/form-data.", 400, "invalid_form")
    parts = _parts(request, max_file_bytes + _MAX_FIELDS_BYTES)
    parser = _FormParser(
        request.headers, parts, max_files=1, max_fields=16, max_part_size=_MAX_FIELDS_BYTES
    )
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            return await parser.parse()
    except TimeoutError:
        raise _late_body() from None
    except MultiPartException as error:
        raise RequestError(f"The form is invalid: {error.message}", 400, "invalid_form") from None


class _FormParser(MultiPartParser):
    """Writes no temporary files, because the server may run without write access."""

    spool_max_size = 1 << 30  # more than any form


async def _parts(request: Request, max_bytes: int) -> AsyncGenerator[bytes]:
    """The parts of a request's body."""
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise RequestError(
                    f"The request is larger than {max_bytes / (1 << 20):.3g} MiB.",
                    413,
                    "request_too_large",
                )
            yield part
    except ClientDisconnect:
        raise RequestError("The client has disconnected.", 400, "disconnected") from None


def _late_body() -> RequestError:
    return RequestError("The request was not sent in time.", 408, "request_timeout")


class AudioBody(Protocol):
    """The body of a reply, as a sequence of parts."""

    media_type: str

    def begin(self) -> bytes:
        """What precedes the first chunk."""
        ...

    def encode(self, chunk: SpeechChunk) -> bytes:
        """A chunk."""
        ...

    def end(self, finish: Finish, num_frames: int) -> bytes:
        """What follows the last chunk of `num_frames` frames in all."""
        ...

    def fail(self, error: RequestError) -> bytes:
        """What reports an error after the first chunk; empty to end the connection instead."""
        ...


class RawBody:
    """Plain samples, with or without a wav header."""

    def __init__(self, audio_format: AudioFormat, media_type: str, *, wav: bool) -> None:
        self.media_type = media_type
        self._header = wav_header(audio_format) if wav else b""

    def begin(self) -> bytes:
        """See `AudioBody`."""
        return self._header

    def encode(self, chunk: SpeechChunk) -> bytes:
        """See `AudioBody`."""
        return chunk.audio

    def end(self, finish: Finish, num_frames: int) -> bytes:
        """See `AudioBody`."""
        return b""

    def fail(self, error: RequestError) -> bytes:
        """See `AudioBody`."""
        return b""


class SpeechResponse(Response):
    """A reply that sends a stream while it is spoken; its headers leave with the first audio.

    An error before that is raised, and becomes a reply of its own. The client's disconnection stops
    the stream.

    Attributes:
        body: Encodes the reply.
    """

    def __init__(self, stream: SpeechStream, body: AudioBody, headers: Mapping[str, str]) -> None:
        """Takes over a stream, which the reply closes."""
        streamed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, {**headers, **streamed}, body.media_type)
        del self.headers["content-length"]
        self.body = body
        self._stream = stream
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the reply."""
        try:
            await run_while_connected(receive, self._deliver(scope, send))
        finally:
            self._stream.close()

    async def _deliver(self, scope: Scope, send: Send) -> None:
        async def send_chunk(chunk: SpeechChunk) -> None:
            await self.send_audio(send, chunk)

        try:
            finish = await self._stream.deliver(send_chunk)
        except RequestError as error:
            if not self._started:
                raise
            if report := self.body.fail(error):
                await self.send_part(send, report, last=True)
            else:
                close_incomplete(scope)
        except SlowClientError:
            close_incomplete(scope)
        else:
            await self.send_end(send, self.body.end(finish, self._stream.num_frames))

    async def send_audio(self, send: Send, chunk: SpeechChunk) -> None:
        """Sends a chunk."""
        await self.send_part(send, self.body.encode(chunk))

    async def send_end(self, send: Send, part: bytes) -> None:
        """Sends the last part."""
        await self.send_part(send, part, last=True)

    async def send_part(self, send: Send, part: bytes, *, last: bool = False) -> None:
        """Sends a part of the body, the first one with the headers."""
        if not self._started:
            self._started = True
            start: Message = {"type": "http.response.start", "status": self.status_code}
            await send(start | {"headers": self.raw_headers})
            part = self.body.begin() + part
        await send({"type": "http.response.body", "body": part, "more_body": not last})


async def run_while_connected(receive: Receive, reply: Coroutine[Any, Any, None]) -> None:
    """Runs the coroutine that sends a reply; the client's disconnection cancels it.

    Raises:
        Exception: What the coroutine raises.
    """
    replying = asyncio.create_task(reply)
    disconnection = asyncio.create_task(_wait_for_disconnection(receive))
    try:
        await asyncio.wait({replying, disconnection}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnection.cancel()
        replying.cancel()  # without effect on a task that is done
    if replying.done():
        await replying


async def _wait_for_disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(name: str, data: str) -> bytes:
    """A server-sent event."""
    return f"event: {name}\ndata: {data}\n\n".encode()


def base64_text(audio: bytes) -> str:
    """Audio in base64."""
    return base64.b64encode(audio).decode("ascii")


class Base64Text:
    """One text in base64 of audio that arrives in portions."""

    def __init__(self) -> None:
        self._pending = b""  # after the last group of base64, which has three bytes

    def add(self, audio: bytes) -> bytes:
        """Returns the next part of the text."""
        audio = self._pending + audio
        whole = len(audio) // 3 * 3
        self._pending = audio[whole:]
        return base64.b64encode(audio[:whole])

    def end(self) -> bytes:
        """Returns the last part."""
        return base64.b64encode(self._pending)


class RequestIds:
    """Middleware that gives each request and socket an identifier and returns it as a header.

    An identifier in the scope's state is that of a server in front, which returns it itself.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        if "request_id" in state:
            await self._app(scope, receive, send)
            return
        request_id = state["request_id"] = new_request_id()
        header = (b"x-request-id", request_id.encode())
        starts = ("http.response.start", "websocket.accept", "websocket.http.response.start")

        async def send_with_id(message: Message) -> None:
            if message["type"] in starts:
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self._app(scope, receive, send_with_id)
