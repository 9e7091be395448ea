"""A session of a server: one context of its WebSocket."""

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel_tts import Finish, TextError, Word
from pipecat_service.errors import ServerError
from pipecat_service.protocol import SOURCE_RATE
from pipecat_service.remote_messages import event_error, foreign_server_error

_CODEC_FRAME_SAMPLES = round(0.08 * SOURCE_RATE)


@dataclass(frozen=True)
class ReceivedChunk:
    """Audio of a server; see `SpeechChunk`."""

    pcm: NDArray[np.int16]
    words: tuple[Word, ...]
    segment: int
    is_break: bool


class RemoteSession:
    """A stream of speech of a server; see `SpeechSession`.

    Attributes:
        finished: Whether no event of the server is expected any more.
        aligned: Whether the latest word has a time from the model's attention; None before one.
        slot_wait_s: See `SpeechSession`; as of the latest audio.
    """

    def __init__(
        self,
        url: str,
        fields: Mapping[str, Any],
        send: Callable[[Mapping[str, Any]], None],
        on_finish: Callable[[], object],
    ) -> None:
        """Starts without text. The first text opens the context on the server.

        Args:
            url: Address of the server, for errors.
            fields: Of the first message.
            send: Sends a message of the session's context; returns at once.
            on_finish: Called once, when no event is expected any more.
        """
        self.finished = False
        self.aligned: bool | None = None
        self.slot_wait_s = 0.0
        self._url = url
        self._fields = fields
        self._send = send
        self._on_finish = on_finish
        self._events = asyncio.Queue[ReceivedChunk | Finish]()
        self._words: tuple[Word, ...] = ()  # that begin in the next chunk
        self._segment = 0
        self._num_samples = 0
        self._started = self._ended = False

    def push_text(self, text: str) -> None:
        """See `SpeechSession`."""
        if self._ended:
            raise TextError("The session's text was ended; open a new session for more.")
        self._send_text(text)

    def flush(self) -> None:
        """See `SpeechSession`."""
        if self._started and not self._ended:
            self._send_text("", flush=True)

    def end(self) -> None:
        """See `SpeechSession`."""
        if not self._ended:
            self._ended = True
            self._send_text("", more=False)

    def _send_text(self, text: str, *, flush: bool = False, more: bool = True) -> None:
        if self.finished:
            return
        first = {} if self._started else self._fields
        self._started = True
        self._send({**first, "transcript": text, "continue": more, "flush": flush})

    def cancel(self) -> None:
        """See `SpeechSession`."""
        while not self._events.empty():
            self._events.get_nowait()
        finish = Finish("cancelled", self._num_codec_frames)
        if self.finished:  # by the server, but not read
            self._events.put_nowait(finish)
        else:
            self._end_context()
            self._finish(finish)

    def _end_context(self) -> None:
        """Has the server drop the context, which text under way would otherwise open again."""
        if self._started:
            self._send({"cancel": True})

    @property
    def _num_codec_frames(self) -> int:
        return self._num_samples // _CODEC_FRAME_SAMPLES

    def receive(self, event: Mapping[str, Any]) -> None:
        """Handles an event of the context."""
        try:
            self._handle(event)
        except (KeyError, TypeError, ValueError) as error:
            self._end_context()
            self.fail(foreign_server_error(self._url, f"invalid event: {error!r}"))

    def _handle(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "timestamps":
            times = event["word_timestamps"]
            for text, start_s, estimated in zip(
                times["words"], times["start"], times["estimated"], strict=True
            ):
                self._words += (Word(text, start_s, None, estimated),)
                self.aligned = not estimated
        elif kind == "chunk":
            self._segment, self.slot_wait_s = event["segment"], event["slot_wait_s"]
            pcm = np.frombuffer(base64.b64decode(event["data"]), "<i2").astype(np.int16)
            self._put(pcm, is_break=event["is_break"])
        elif kind == "error":
            self._end_context()
            self.fail(event_error(event, self._url))
        elif kind == "done":
            if not self._ended:  # the speech was cut off
                self._end_context()
            if self._words:
                self._put(np.zeros(0, np.int16), is_break=False)
            self._finish(Finish(event["finish_reason"], self._num_codec_frames))

    def _put(self, pcm: NDArray[np.int16], *, is_break: bool) -> None:
        """Adds audio with the words that were announced."""
        self._num_samples += len(pcm)
        self._events.put_nowait(ReceivedChunk(pcm, self._words, self._segment, is_break))
        self._words = ()

    def fail(self, error: ServerError) -> None:
        """Ends the session with an error, after the audio that was received."""
        if not self.finished:
            self._finish(Finish("error", self._num_codec_frames, error))

    def _finish(self, finish: Finish) -> None:
        self.finished = True
        self._events.put_nowait(finish)
        self._on_finish()

    async def __aiter__(self) -> AsyncGenerator[ReceivedChunk | Finish, None]:
        event = None
        while not isinstance(event, Finish):
            event = await self._events.get()
            yield event
