"""A context of Cartesia's WebSocket: text in portions, its stream, and the events of its audio."""

import asyncio
import logging
import re
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from megakernel_tts import split_words
from megakernel_tts.server import cartesia_messages as messages
from megakernel_tts.server.errors import RequestError, SlowClientError
from megakernel_tts.server.fields import MAX_TEXT_CHARACTERS, get_field
from megakernel_tts.server.streams import SpeechChunk, SpeechRequest, SpeechStream

if TYPE_CHECKING:
    from megakernel_tts.server.cartesia_socket import CartesiaSocket

_log = logging.getLogger("megakernel_tts.server")

_MAX_BUFFER_DELAY_MS = 5000
_DEFAULT_BUFFER_DELAY_MS = 3000
_CLAUSE_PAUSE_S, _WORD_PAUSE_S = 0.15, 0.5  # without text, after a clause and within one
_MIN_LEAD_S = 0.2  # of audio, at which text that pauses is flushed
_MAX_WORD_CHARACTERS = 100  # at the end of the text, which are searched for a clause's end
_FIXED_FIELDS = ("model_id", "voice", "output_format", "language", "locale")  # of a context
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*$")


class Context:
    """One context of a socket: text that arrives in portions, and the stream that speaks it.

    The stream is opened with the first word. When no more text arrives, the engine would stop
    within a phrase, as it takes one token per frame. The text so far is then flushed: in a pause at
    the end of a word, once playback is about to end, and after `max_buffer_delay_ms` in any case.
    """

    def __init__(
        self,
        socket: "CartesiaSocket",
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
        self._pause: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._text = ""
        self._num_pushed = 0  # characters of `_text` in the stream
        self._ended = False
        self._flushes: deque[tuple[int, int]] = deque()  # identifier and words before each flush
        self._num_flushes = 0
        self._num_flushed = 0  # characters before the last flush
        self._num_flushed_words = 0
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
        if self._pause is not None:
            self._pause.cancel()
        await self._push()
        if more and flush:
            self._num_flushes += 1
            self._num_flushed_words += _count_words(self._text[self._num_flushed :])
            self._num_flushed = len(self._text)
            self._flushes.append((self._num_flushes, self._num_flushed_words))
            if self._stream is not None:
                self._stream.flush()
                self._watch_flushes()
        elif more:
            self._pause = asyncio.create_task(self._flush_pause(delay_ms / 1000))
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

    async def _flush_pause(self, max_delay_s: float) -> None:
        """Flushes text that pauses when its speech would stop, or after `max_delay_s`."""
        if self._stream is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(max_delay_s):
                await asyncio.sleep(_pause_s(self._text, max_delay_s))
                await self._stream.playback.wait_until_lead(_MIN_LEAD_S)
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
        if self._pause is not None:
            self._pause.cancel()
        if self._watch is not None:
            self._watch.cancel()
        if self._socket.contexts.get(self._id) is self:
            del self._socket.contexts[self._id]


def _pause_s(text: str, max_delay_s: float) -> float:
    """Seconds without text that are a pause; within a word there is none before `max_delay_s`."""
    if text[-1:].isalnum():
        return max_delay_s
    words = split_words(text[-_MAX_WORD_CHARACTERS:])
    return _CLAUSE_PAUSE_S if words and words[-1].ends_clause else _WORD_PAUSE_S


def _count_words(text: str) -> int:
    return sum(word.spoken for word in split_words(text))


def _needs_space(before: str, text: str) -> bool:
    """Whether a sentence and the next one were sent without the space between them."""
    joined = not before[-1:].isspace() and not text[:1].isspace()
    return joined and bool(text) and bool(_SENTENCE_END.search(before))
