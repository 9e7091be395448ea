"""Cartesia's WebSocket: any number of contexts, each of which is one stream of speech."""

import asyncio
import json
import logging
import re
import time
from collections import deque
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from megakernel_tts import split_words
from megakernel_tts.server import cartesia_messages as messages
from megakernel_tts.server.errors import RequestError, SlowClientError
from megakernel_tts.server.fields import MAX_TEXT_CHARACTERS, get_field, parse_object
from megakernel_tts.server.streams import SpeechChunk, SpeechRequest, SpeechStream, SpeechStreams

_log = logging.getLogger("megakernel_tts.server")

_MAX_CONTEXTS = 64  # of a socket
_MAX_BUFFER_DELAY_MS = 5000
_DEFAULT_BUFFER_DELAY_MS = 3000
_FIXED_FIELDS = ("model_id", "voice", "output_format", "language", "locale")  # of a context
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*$")


class CartesiaSocket:
    """One connection. Messages are handled in order; contexts speak at the same time."""

    def __init__(self, websocket: WebSocket, streams: SpeechStreams) -> None:
        """Takes over a connection whose handshake has not been answered."""
        self.streams = streams
        self.request_id: str = websocket.scope["state"]["request_id"]
        self.contexts: dict[str, Context] = {}
        self._websocket = websocket
        self._sending = asyncio.Lock()  # fair, so that contexts take turns
        self._too_slow = asyncio.Event()

    async def run(self) -> None:
        """Serves the connection until it closes, which stops all of its contexts."""
        await self._websocket.accept()
        reading = asyncio.create_task(self._read())
        too_slow = asyncio.create_task(self._too_slow.wait())
        try:
            await asyncio.wait({reading, too_slow}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            too_slow.cancel()
            for context in [*self.contexts.values()]:
                context.cancel()
        if reading.done():
            await reading

    def close_slow(self) -> None:
        """Ends the connection of a client that does not read."""
        self._too_slow.set()

    async def _read(self) -> None:
        try:
            while True:
                await self._handle(await self._websocket.receive_text())
        except (WebSocketDisconnect, KeyError):  # KeyError: a binary message
            return

    async def _handle(self, data: str) -> None:
        context_id = ""
        try:
            message = parse_object(data)
            context_id = get_field(message, "context_id", str, "")
            if not context_id:
                raise RequestError("A message needs a context_id.", parameter="context_id")
            await self._dispatch(context_id, message)
        except RequestError as error:
            if context := self.contexts.get(context_id):
                context.cancel()
            await self.send(context_id, messages.error_event(error, self.request_id))

    async def _dispatch(self, context_id: str, message: dict[str, Any]) -> None:
        context = self.contexts.get(context_id)
        more = get_field(message, "continue", bool, False)
        if get_field(message, "cancel", bool, False):
            if context is not None:
                context.cancel()
            return
        if context is None:
            if len(self.contexts) >= _MAX_CONTEXTS:
                raise RequestError(
                    f"A socket has at most {_MAX_CONTEXTS} contexts.", 429, "too_many_contexts"
                )
            if not more and not messages.transcript_of(message).strip():
                await self.send(context_id, messages.done_event())
                return
            request = messages.speech_request(message, self.streams, text=None, paced=True)
            context = self.contexts[context_id] = Context(self, context_id, message, request)
        await context.add(message)

    async def send(self, context_id: str, event: dict[str, Any]) -> None:
        """Sends an event of a context; does nothing once the connection is closed."""
        text = json.dumps(event | {"context_id": context_id})
        async with self._sending:
            try:
                await self._websocket.send_text(text)
            except (WebSocketDisconnect, RuntimeError):  # RuntimeError: it was closed before
                return


class Context:
    """One context of a socket: text that arrives in portions, and the stream that speaks it.

    The stream is opened with the first word. Text after which no more arrives for
    `max_buffer_delay_ms` is spoken to its end, as at a flush.
    """

    def __init__(
        self,
        socket: CartesiaSocket,
        context_id: str,
        message: dict[str, Any],
        request: SpeechRequest,
    ) -> None:
        """Starts without text.

        Args:
            socket: Its connection.
            context_id: Its name.
            message: The first message, which fixes voice, language and format.
            request: The stream that it describes.
        """
        self._socket = socket
        self._id = context_id
        self._fixed = {name: message.get(name) for name in _FIXED_FIELDS}
        self._request = request
        self._wants_words = get_field(message, "add_timestamps", bool, False)
        self._stream: SpeechStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._text = ""
        self._num_pushed = 0  # characters of `_text` in the stream
        self._ended = False
        self._flushes: deque[tuple[int, int]] = deque()  # identifier and words before each flush
        self._num_flushes = 0
        self._num_words = 0  # that began in the audio so far
        self._sent_s = time.monotonic()

    async def add(self, message: dict[str, Any]) -> None:
        """Handles a message of the context.

        Raises:
            RequestError: It is invalid, or the server is full.
        """
        text = messages.transcript_of(message)
        delay_ms = get_field(message, "max_buffer_delay_ms", int, _DEFAULT_BUFFER_DELAY_MS)
        more = get_field(message, "continue", bool, False)
        flush = get_field(message, "flush", bool, False) or (delay_ms == 0 and bool(text.strip()))
        if self._ended and not more and not text.strip():
            return  # the end of the text is repeated
        self._check(message, text, delay_ms)
        if delay_ms == 0 and _needs_space(self._text, text):
            text = " " + text
        self._text += text
        if self._idle is not None:
            self._idle.cancel()
        await self._push()
        if more and flush:
            self._num_flushes += 1
            self._flushes.append((self._num_flushes, _count_words(self._text)))
            if self._stream is not None:
                self._stream.flush()
                self._watch_flushes()
        elif more:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(delay_ms / 1000, self._flush_idle)
        else:
            self._ended = True
            await self._end()

    def _check(self, message: dict[str, Any], text: str, delay_ms: int) -> None:
        if self._ended:
            raise RequestError("Context has closed.", 400, "context_closed", "context_id")
        for name, value in self._fixed.items():
            if name in message and message[name] != value:
                raise RequestError(
                    f"{name} differs from that of the context's first message.", parameter=name
                )
        if not 0 <= delay_ms <= _MAX_BUFFER_DELAY_MS:
            raise RequestError(
                f"max_buffer_delay_ms is {delay_ms}; it must be from 0 to {_MAX_BUFFER_DELAY_MS}.",
                parameter="max_buffer_delay_ms",
            )
        if len(self._text) + len(text) > MAX_TEXT_CHARACTERS:
            raise RequestError(
                f"The context has more than {MAX_TEXT_CHARACTERS:,} characters.",
                parameter="transcript",
            )

    async def _push(self) -> None:
        """Passes new text to the stream, which its first word opens."""
        if self._stream is None:
            if not _count_words(self._text):
                return
            self._stream = await self._socket.streams.open(self._request)
            self._task = asyncio.create_task(self._speak(self._stream))
        text, self._num_pushed = self._text[self._num_pushed :], len(self._text)
        if text:
            await self._stream.push_text(text)

    def _flush_idle(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    async def _end(self) -> None:
        if self._stream is not None:
            self._stream.end()
        else:  # text without words
            await self._report_flushes(all_spoken=True)
            await self._send(messages.done_event())
            self._remove()

    async def _speak(self, stream: SpeechStream) -> None:
        """Sends the audio of the stream to its end."""
        error: RequestError | None = None
        try:
            await stream.deliver(self._send_chunk)
            await self._report_flushes(all_spoken=True)
            await self._send(messages.done_event())
        except RequestError as failure:
            error = failure
        except SlowClientError:
            self._socket.close_slow()
        except Exception:
            _log.exception("A context failed")
            error = RequestError("Internal error.", 500, "internal_error")
        finally:
            stream.close()
            self._remove()
        if error is not None:
            await self._send(messages.error_event(error, self._socket.request_id))

    async def _send_chunk(self, chunk: SpeechChunk) -> None:
        if chunk.words:
            await self._report_flushes()  # the audio of the text before them has been sent
            self._num_words += len(chunk.words)
            if self._wants_words:
                await self._send(messages.timestamps_event(chunk.words))
        if chunk.audio:
            now_s = time.monotonic()
            await self._send(messages.chunk_event(chunk, 1000 * (now_s - self._sent_s)))
            self._sent_s = now_s
        self._watch_flushes()

    def _watch_flushes(self) -> None:
        """Reports flushes at the end of playback: later text may begin much later, or never."""
        if self._flushes and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._report_played())

    async def _report_played(self) -> None:
        assert self._stream is not None
        await self._stream.playback.wait_until_lead(0.0)
        await self._report_flushes()

    async def _report_flushes(self, *, all_spoken: bool = False) -> None:
        """Reports the flushes whose words have begun, once the audio after them was sent."""
        while self._flushes and (all_spoken or self._flushes[0][1] <= self._num_words):
            await self._send(messages.flush_done_event(self._flushes.popleft()[0]))

    async def _send(self, event: dict[str, Any]) -> None:
        await self._socket.send(self._id, event)

    def cancel(self) -> None:
        """Stops the context; nothing more is sent for it."""
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.close()
        self._remove()

    def _remove(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._watch is not None:
            self._watch.cancel()
        if self._socket.contexts.get(self._id) is self:
            del self._socket.contexts[self._id]


def _count_words(text: str) -> int:
    return sum(word.spoken for word in split_words(text))


def _needs_space(before: str, text: str) -> bool:
    """Whether a sentence and the next one were sent without the space between them."""
    joined = not before[-1:].isspace() and not text[:1].isspace()
    return joined and bool(text) and bool(_SENTENCE_END.search(before))
