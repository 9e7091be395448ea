"""`/v1/audio/speech/batch`: several texts in one request, as in vLLM-Omni."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megakernel_tts.server.connections import close_incomplete
from megakernel_tts.server.encoding import wav_header
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import get_field, priority_of
from megakernel_tts.server.http import Base64Text, read_object, run_while_connected
from megakernel_tts.server.keys import Priority
from megakernel_tts.server.openai_requests import WAV, max_body_bytes, speech_request, usage_of
from megakernel_tts.server.reports import Caller
from megakernel_tts.server.speech_stream import SpeechChunk, SpeechRequest
from megakernel_tts.server.streams import SpeechStreams

_MAX_ITEMS = 32
_MAX_CHARACTERS = 1 << 14  # of all items
_MAX_AUDIO_BYTES = 64 << 20  # of all items, whose audio is kept in memory
_SEND_TIMEOUT_S = 30.0  # for which a client may not read


class BatchEndpoint:
    """The endpoint, over the streams of a server."""

    def __init__(self, streams: SpeechStreams) -> None:
        self._streams = streams

    async def speak(self, request: Request) -> Response:
        """Speaks all items of a request; one that fails does not affect the others."""
        caller = Caller.of(request.scope, "openai")
        fields = await read_object(request, max_body_bytes(self._streams))
        items = _items(fields)
        self._streams.check_admission(caller, _or_batch(priority_of(fields)))
        return _BatchResponse(items, self._streams, caller)


def _items(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The items of a request; fields that an item leaves out are those of the request."""
    items = get_field(fields, "items", list, [])
    if not 1 <= len(items) <= _MAX_ITEMS or not all(isinstance(item, dict) for item in items):
        raise RequestError(
            f"items must be an array of 1 to {_MAX_ITEMS} objects, each with an input.",
            parameter="items",
        )
    num_characters = sum(len(text) for item in items if isinstance(text := item.get("input"), str))
    if num_characters > _MAX_CHARACTERS:
        raise RequestError(
            f"The items have {num_characters:,} characters; at most {_MAX_CHARACTERS:,} are "
            "allowed in a batch.",
            400,
            "string_above_max_length",
            "items",
        )
    shared = {name: value for name, value in fields.items() if name not in ("items", "input")}
    return [
        shared | {name: value for name, value in item.items() if value is not None}
        for item in items
    ]


class _Result:
    """What became of one item.

    Attributes:
        succeeded: Whether it was spoken to its end.
        num_bytes: Bytes of its audio.
    """

    def __init__(self, index: int) -> None:
        """Starts without audio."""
        self.succeeded = False
        self.num_bytes = 0
        self._index = index
        self._audio: list[bytes] = []
        self._fields: dict[str, Any] = {"media_type": None, "error": None, "usage": None}

    def add(self, audio: bytes) -> None:
        """Keeps the audio of a chunk."""
        self._audio.append(audio)
        self.num_bytes += len(audio)

    def succeed(self, speech: SpeechRequest, media_type: str, num_frames: int) -> None:
        """Completes the audio."""
        self.succeeded = True
        usage = usage_of(len(speech.text or ""), num_frames)
        self._fields |= {"media_type": media_type, "usage": usage}
        if media_type == WAV:
            self._audio.insert(0, wav_header(speech.audio_format, self.num_bytes))

    def fail(self, error: RequestError) -> None:
        """Replaces the audio by an error."""
        self._audio, self.num_bytes = [], 0
        self._fields["error"] = error.message

    def parts(self) -> Iterator[bytes]:
        """The JSON object, in parts: encoding all of it at once would hold up the event loop."""
        status = "success" if self.succeeded else "error"
        start = json.dumps({"index": self._index, "status": status} | self._fields)[:-1]
        if self.succeeded:
            text = Base64Text()
            yield f'{start}, "audio_data": "'.encode()
            yield from map(text.add, self._audio)
            yield text.end() + b'"}'
        else:
            yield f'{start}, "audio_data": null}}'.encode()


class _BatchResponse(Response):
    """The reply: each result is sent once it and those before it are complete.

    As many items speak at once as the engine has slots. The client's disconnection stops them.
    """

    media_type = "application/json"

    def __init__(
        self, items: Sequence[Mapping[str, Any]], streams: SpeechStreams, caller: Caller
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._items = items
        self._streams = streams
        self._caller = caller
        self._results = [_Result(index) for index in range(len(items))]
        self._reading = asyncio.Lock()  # one recording is cloned at a time
        max_streams = caller.account.max_streams or streams.num_slots
        self._speaking = asyncio.Semaphore(max(1, min(max_streams, streams.num_slots)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the reply."""
        await run_while_connected(receive, self._deliver(scope, send))

    async def _deliver(self, scope: Scope, send: Send) -> None:
        speaking = map(self._speak, self._results, self._items)
        tasks = [asyncio.create_task(each) for each in speaking]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            start = f'{{"id": "speech-batch-{self._caller.request_id}", "results": ['
            await _send(send, start.encode())
            for index, (task, result) in enumerate(zip(tasks, self._results, strict=True)):
                await task
                for part in result.parts():
                    await _send(send, part)
                await _send(send, b", " if index + 1 < len(tasks) else b"], ")
            succeeded = sum(result.succeeded for result in self._results)
            counts = {"total": len(tasks), "succeeded": succeeded, "failed": len(tasks) - succeeded}
            await _send(send, json.dumps(counts)[1:].encode(), last=True)
        except TimeoutError:
            close_incomplete(scope)
        finally:
            for task in tasks:
                task.cancel()

    async def _speak(self, result: _Result, item: Mapping[str, Any]) -> None:
        """Speaks an item to its end."""
        try:
            async with self._reading:
                speech, media_type = await speech_request(item, self._streams, self._caller)
            async with self._speaking:
                await self._speak_into(result, speech, media_type)
        except RequestError as error:
            result.fail(error)

    async def _speak_into(self, result: _Result, speech: SpeechRequest, media_type: str) -> None:
        async def keep(chunk: SpeechChunk) -> None:
            num_bytes = sum(each.num_bytes for each in self._results) + len(chunk.audio)
            if num_bytes > _MAX_AUDIO_BYTES:
                raise RequestError(
                    f"The audio of a batch has at most {_MAX_AUDIO_BYTES >> 20} MiB; send the item "
                    "in a request of its own.",
                    400,
                    "audio_too_large",
                    "items",
                )
            result.add(chunk.audio)

        speech = replace(speech, priority=_or_batch(speech.priority))
        stream = await self._streams.open(speech, self._caller)
        try:
            await stream.deliver(keep)
        finally:
            stream.close()
        result.succeed(speech, media_type, stream.num_frames)


def _or_batch(priority: Priority | None) -> Priority:
    return Priority.BATCH if priority is None else priority


async def _send(send: Send, part: bytes, *, last: bool = False) -> None:
    """Sends a part of the reply.

    Raises:
        TimeoutError: The client does not read.
    """
    async with asyncio.timeout(_SEND_TIMEOUT_S):
        await send({"type": "http.response.body", "body": part, "more_body": not last})
