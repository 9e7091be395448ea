"""A live turn: text in portions, the stream that speaks it, and what it reports to its protocol."""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from megakernel_tts import Finish, LivePolicy, has_spoken_words, split_words
from megakernel_tts.server.errors import RequestError, SlowClientError
from megakernel_tts.server.fields import MAX_TEXT_CHARACTERS
from megakernel_tts.server.reports import Caller
from megakernel_tts.server.speech_stream import SpeechChunk, SpeechRequest, SpeechStream
from megakernel_tts.server.streams import SpeechStreams

_log = logging.getLogger("megakernel_tts.server")

MAX_PAUSE_S = 3.0  # without text, after which the text so far is spoken to its end

_LIVE = LivePolicy()
_MAX_WORD_CHARACTERS = 100  # at the end of the text, which are searched for a clause's end
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*$")


class Listener(Protocol):
    """Receives what a live speech reports, in order; a method returns once that was sent."""

    async def send_chunk(self, chunk: SpeechChunk) -> None:
        """Audio, and the words that begin in it."""
        ...

    async def report_flush(self, number: int) -> None:
        """Flush `number` is done: its text was sent and later text was not, or its text was played.

        Args:
            number: 1 for the first flush.
        """
        ...

    async def report_end(self, finish: Finish | None) -> None:
        """All audio was sent. Neither this nor an error follows a cancellation.

        Args:
            finish: The end of the stream; None for a text without words.
        """
        ...

    async def report_error(self, error: RequestError) -> None:
        """The speech ended with an error."""
        ...


L = TypeVar("L", bound=Listener)


class LiveSpeech(Generic[L]):
    """Text that arrives in portions, and the stream that speaks it.

    The stream is opened with the first word. When no more text arrives, the engine would stop
    within a phrase, as it takes one token per frame. The text so far is then flushed: in a pause at
    the end of a word, once playback is about to end, and after a limit in any case.

    Attributes:
        listener: Receives audio and events.
        request: The stream to open; a change after the first word has no effect.
        text_ended: Whether no more text will be added.
    """

    def __init__(
        self,
        streams: SpeechStreams,
        request: SpeechRequest,
        caller: Caller,
        listener: L,
        *,
        on_close: Callable[[], object],
        on_slow_client: Callable[[], object],
        max_idle_s: float | None = None,
    ) -> None:
        """Starts without text.

        Args:
            streams: The streams of the server.
            request: The stream to open.
            caller: Who requests it.
            listener: Receives audio and events.
            on_close: Called once, when nothing more will be spoken.
            on_slow_client: Called if the client does not read its audio.
            max_idle_s: Seconds without a call of this object after which the text ends; None for
                no limit.
        """
        self.listener = listener
        self.text_ended = False
        self._streams = streams
        self.request = request
        self._caller = caller
        self._on_close = on_close
        self._on_slow_client = on_slow_client
        self._max_idle_s = max_idle_s
        self._closed = False
        self._stream: SpeechStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._pause: asyncio.Task[None] | None = None
        self._flush_report: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._idle_end: asyncio.Task[None] | None = None  # after the idle time
        self._text = ""
        self._num_pushed = 0  # characters of `_text` in the stream
        self._flushes: deque[tuple[int, int]] = deque()  # number and words before each flush
        self._num_flushes = 0
        self._num_flushed = 0  # characters before the last flush
        self._num_flushed_words = 0
        self._num_words = 0  # that began in the audio so far
        self.keep_alive()

    def keep_alive(self) -> None:
        """Restarts the time after which the text ends by itself."""
        self._stop_idle_time()
        if self._max_idle_s is not None and not (self.text_ended or self._closed):
            self._idle = asyncio.get_running_loop().call_later(self._max_idle_s, self._end_idle)

    def _stop_idle_time(self) -> None:
        if self._idle is not None:
            self._idle.cancel()

    def _end_idle(self) -> None:
        self._idle_end = asyncio.create_task(self.end())

    async def add(self, text: str, *, whole_sentences: bool = False) -> None:
        """Adds text, which is spoken as far as it suffices: call a `flush` or `end` after it.

        Args:
            text: Any part of the text.
            whole_sentences: Whether portions are sentences, between which a space may be missing.

        Raises:
            RequestError: The text has ended, is too long or no Unicode text; the server is full.
        """
        if self.text_ended or self._closed:
            raise RequestError("The context has closed: its text has ended.", 400, "context_closed")
        if len(self._text) + len(text) > MAX_TEXT_CHARACTERS:
            raise RequestError(
                f"The text has more than {MAX_TEXT_CHARACTERS:,} characters.",
                400,
                "text_too_long",
                "text",
            )
        if whole_sentences and _needs_space(self._text, text):
            text = " " + text
        self._text += text
        if self._pause is not None:
            self._pause.cancel()
        self._stop_idle_time()  # a stream may take long to open
        await self._push()
        self.keep_alive()

    async def _push(self) -> None:
        """Passes new text to the stream, which its first word opens."""
        if self._stream is None:
            if not has_spoken_words(self._text):
                return
            self._stream = await self._streams.open(self.request, self._caller)
            self._task = asyncio.create_task(self._speak(self._stream))
        text, self._num_pushed = self._text[self._num_pushed :], len(self._text)
        if text:
            await self._stream.push_text(text)

    def flush(self) -> None:
        """Has the text so far spoken to its end, and reported as flushed."""
        self._num_flushes += 1
        self._num_flushed_words += _count_words(self._text[self._num_flushed :])
        self._num_flushed = len(self._text)
        self._flushes.append((self._num_flushes, self._num_flushed_words))
        if self._stream is not None:
            self._stream.flush()
            self._schedule_flush_report()

    def flush_when_paused(self, max_pause_s: float = MAX_PAUSE_S) -> None:
        """Has the text so far spoken to its end if no more follows; this is not reported.

        Args:
            max_pause_s: Seconds without text after which it is spoken in any case.
        """
        if self._stream is not None:
            self._pause = asyncio.create_task(self._flush_pause(self._stream, max_pause_s))

    async def _flush_pause(self, stream: SpeechStream, max_pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max_pause_s):
                await asyncio.sleep(_pause_s(self._text, max_pause_s))
                await stream.playback.wait_until_lead(_LIVE.min_lead_s)
        stream.flush()

    async def end(self) -> None:
        """Ends the text; returns before it was spoken. A second call does nothing."""
        if self.text_ended:
            return
        self.text_ended = True
        self._stop_idle_time()
        if self._stream is not None:
            self._stream.end()
        else:  # text without words
            await self._report_flushes(all_spoken=True)
            self._close()
            await self.listener.report_end(None)

    def cancel(self) -> None:
        """Stops the speech; nothing more is reported."""
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.close()
        self._close()

    async def _speak(self, stream: SpeechStream) -> None:
        """Sends the audio of the stream to its end."""
        finish: Finish | None = None
        error: RequestError | None = None
        try:
            finish = await stream.deliver(self._send_chunk)
            await self._report_flushes(all_spoken=True)
        except RequestError as failure:
            error = failure
        except SlowClientError:
            self._on_slow_client()
            return
        except Exception:
            fields = {"request_id": self._caller.request_id}
            _log.exception("A live speech failed.", extra={"fields": fields})
            error = RequestError("Internal error.", 500, "internal_error")
        finally:
            stream.close()
            self._close()
        if error is None:
            await self.listener.report_end(finish)
        else:
            await self.listener.report_error(error)

    async def _send_chunk(self, chunk: SpeechChunk) -> None:
        if chunk.words:
            await self._report_flushes()  # the audio of the text before them has been sent
            self._num_words += len(chunk.words)
        await self.listener.send_chunk(chunk)
        self._schedule_flush_report()

    def _schedule_flush_report(self) -> None:
        """Reports flushes at the end of playback: later text may begin much later, or never."""
        if self._flushes and (self._flush_report is None or self._flush_report.done()):
            self._flush_report = asyncio.create_task(self._report_played())

    async def _report_played(self) -> None:
        assert self._stream is not None
        await self._stream.playback.wait_until_lead(0.0)
        await self._report_flushes()

    async def _report_flushes(self, *, all_spoken: bool = False) -> None:
        """Reports the flushes whose words have begun, once the audio after them was sent."""
        while self._flushes and (all_spoken or self._flushes[0][1] <= self._num_words):
            await self.listener.report_flush(self._flushes.popleft()[0])

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop_idle_time()
        for task in (self._pause, self._flush_report):
            if task is not None:
                task.cancel()
        self._on_close()


def _pause_s(text: str, max_pause_s: float) -> float:
    """Seconds without text that are a pause; within a word or tag only `max_pause_s` is one."""
    words = split_words(text[-_MAX_WORD_CHARACTERS:])
    if text[-1:].isalnum() or (words and words[-1].in_tag):
        return max_pause_s
    return _LIVE.min_pause_s if words and words[-1].ends_clause else _LIVE.max_pause_s


def _count_words(text: str) -> int:
    return sum(word.spoken for word in split_words(text))


def _needs_space(before: str, text: str) -> bool:
    """Whether a sentence and the next one were sent without the space between them."""
    joined = not before[-1:].isspace() and not text[:1].isspace()
    return joined and bool(text) and bool(_SENTENCE_END.search(before))
