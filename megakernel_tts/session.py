"""The public side of one stream of speech: text goes in, events come out."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from megakernel_common.events import BaseEventQueue, ReaderWakeups
from megakernel_common.process import OwnerProcess
from megakernel_tts.align.words import Word
from megakernel_tts.checks import check_text
from megakernel_tts.errors import SynthesisError, TextError

if TYPE_CHECKING:
    from megakernel_tts.text.text_queue import TextQueue

FinishReason = Literal["eos", "length", "guard", "cancelled", "error"]

FRAME_S = 0.08  # of speech: the codec has 12.5 frames per second
MAX_PUSH_CHARACTERS = 4096  # tokenised under one acquisition of the text queue's lock
MAX_BLOCKING_CHARACTERS = 1000  # tokenised on an event loop's thread, which takes 1 ms


@dataclass(frozen=True)
class AudioChunk:
    """Some consecutive frames of speech, or silence of a break.

    Attributes:
        pcm: 16-bit samples [samples].
        sample_rate: Sampling rate of `pcm` in Hz.
        codes: Codec codes [frames, groups] that `pcm` was decoded from. A break has no frames. At
            another speed than 1, `pcm` lags by up to 90 ms of speech, and the rest of a segment of
            the text follows without frames.
        frame: Index of the chunk's first frame in the stream.
        words: Words that begin in the chunk, in order. The last chunk of a text also holds the
            words whose beginning was not found.
        segment: Index of the segment of the text (a few sentences, or the text up to a flush).
    """

    pcm: NDArray[np.int16]
    sample_rate: int
    codes: NDArray[np.int64]
    frame: int
    words: tuple[Word, ...] = ()
    segment: int = 0

    @property
    def is_break(self) -> bool:
        """Whether it is silence of a break."""
        return len(self.pcm) > 0 and not len(self.codes) and not self.pcm.any()


@dataclass(frozen=True)
class Finish:
    """The last event of every stream.

    Attributes:
        reason: `eos`: the whole text was spoken. `length`: a segment of the text reached
            `max_frames` or the end of its slot. `guard`: a segment did not end and was stopped.
            `cancelled`: the session was cancelled or the engine closed. `error`: see `error`.
        frames: Number of frames delivered, including those unread after a cancellation.
        error: The failure if `reason` is `error`, with its cause attached.
    """

    reason: FinishReason
    frames: int
    error: SynthesisError | None = None


Event = AudioChunk | Finish


@dataclass(frozen=True)
class ChunkPolicy:
    """Sizes of a stream's chunks: `first` frames, at most doubled for each chunk, up to `largest`.

    A chunk grows only as far as its frames can be made while the audio before it is played. If
    `first` equals `largest`, sizes do not depend on the speed.

    Attributes:
        first: Frames of the first chunk; 1 has the lowest latency. It may have one more, up to
            `largest`, while more than 36 streams make frames.
        largest: Frames of a chunk at most; larger chunks cost less to decode.
        ahead: Unread frames at which the stream pauses until some are read.
    """

    first: int = 1
    largest: int = 8
    ahead: int = 250

    def __post_init__(self) -> None:
        for name, frames in vars(self).items():
            if type(frames) is not int:
                raise TypeError(f"ChunkPolicy.{name} is {frames!r}; it must be a whole number.")
        if not 1 <= self.first <= self.largest <= self.ahead:
            raise ValueError(f"{self}: 1 <= first <= largest <= ahead must hold.")


class EventQueue(BaseEventQueue[Event]):
    """Events of one session, from the engine thread to one reader.

    Attributes:
        num_unread: Frames in the queue, those for which a break lasts included.
    """

    def __init__(
        self,
        on_read: Callable[[], None],
        on_abandon: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wakeups: ReaderWakeups | None = None,
    ) -> None:
        """Creates an empty queue.

        Args:
            on_read: Called by the reader after each chunk that it takes.
            on_abandon: Called when the session is abandoned; must not take a lock.
            clock: The engine's clock, in seconds.
            wakeups: Receives the queue after each event. None: of the queue's own.
        """
        super().__init__(on_abandon)
        self._on_read = on_read
        self._wakeups = wakeups or ReaderWakeups()
        self._muted = False
        self.num_unread = 0
        self._clock = clock
        # Seconds of the waits that are over, and the start of the present one: replaced together.
        self._slot_waits: tuple[float, float | None] = (0.0, None)

    @property
    def slot_wait_s(self) -> float:
        """Seconds for which the stream waited because all slots, or their memory, were in use."""
        total_s, since_s = self._slot_waits
        return total_s if since_s is None else total_s + self._clock() - since_s

    def start_slot_wait(self) -> None:
        """Records that all slots are in use, unless that is known; called by the engine thread."""
        if self._slot_waits[1] is None:
            self._slot_waits = self._slot_waits[0], self._clock()

    def end_slot_wait(self) -> None:
        """Records that the stream has a slot; called by the engine thread."""
        if self._slot_waits[1] is not None:
            self._slot_waits = self.slot_wait_s, None

    def put(self, event: Event) -> None:
        """Appends an event; called by the engine thread, which then wakes the readers."""
        with self._lock:
            if isinstance(event, AudioChunk):
                if self._muted:
                    return
                self.num_unread += _num_frames(event)
            self._events.append(event)
        self._wakeups.add(self)

    def get_nowait(self) -> Event | None:
        """Takes the next event, or returns None if there is none; a `Finish` stays in the queue."""
        with self._lock:
            event = self._events[0] if self._events else None
            if isinstance(event, AudioChunk):
                self._events.popleft()
                self.num_unread -= _num_frames(event)
        if isinstance(event, AudioChunk):
            self._on_read()
        return event

    def get(self) -> Event:
        """Waits for the next event and takes it; a `Finish` stays in the queue."""
        while (event := self.get_nowait()) is None:
            with self._lock:
                self._changed.wait_for(lambda: bool(self._events))
        return event

    def mute(self) -> None:
        """Drops the unread audio and all later audio; a `Finish` stays."""
        with self._lock:
            self._muted = True
            self._events = deque(e for e in self._events if isinstance(e, Finish))
            self.num_unread = 0


def _num_frames(chunk: AudioChunk) -> int:
    """Returns the frames of a chunk, or those for which its silence lasts."""
    return len(chunk.codes) or round(len(chunk.pcm) / chunk.sample_rate / FRAME_S)


class Session:
    """A stream of speech: push text, end it, and iterate over the events (or asynchronously).

    The iteration ends after the `Finish`. Dropping a session, or leaving its `with` block, cancels
    it.
    """

    def __init__(self, text: "TextQueue", events: EventQueue, on_text: Callable[[], None]) -> None:
        """Connects the text queue and the event queue of one stream.

        Args:
            text: Read by the engine.
            events: Written by the engine.
            on_text: Called after text was added to `text`.
        """
        self._text = text
        self._events = events
        self._on_text = on_text
        self._finish: Finish | None = None
        self._process = OwnerProcess()

    @property
    def finish(self) -> Finish | None:
        """The stream's last event, once it was read."""
        return self._finish

    @property
    def slot_wait_s(self) -> float:
        """Seconds for which the stream waited because all slots, or their memory, were in use.

        It includes the wait that is under way.
        """
        return self._events.slot_wait_s

    @property
    def num_waiting_segments(self) -> int:
        """Segments of the text (a few sentences each) behind the one that is spoken at present.

        A writer that is faster than the speech bounds the memory of its text by pausing while
        several segments wait.

        Raises:
            ForkedProcessError: This process was forked after the session was opened.
        """
        self._process.check()
        with self._text.lock:
            return self._text.num_waiting

    def push_text(self, text: str) -> None:
        """Adds text to be spoken; without effect once the stream has finished.

        `<break time="0.8s"/>` is silence, `<spell>A1</spell>` is spelled, and other tags are not
        spoken. A tag may arrive in portions.

        Raises:
            TextError: It is no Unicode text, or the text was ended.
            ForkedProcessError: This process was forked after the session was opened.
        """
        self._process.check()
        check_text(text)
        for start in range(0, len(text), MAX_PUSH_CHARACTERS):
            with self._text.lock:
                if self._text.text_ended:
                    raise TextError("The session's text was ended; open a new session for more.")
                if self._text.closed:
                    return
                self._text.push(text[start : start + MAX_PUSH_CHARACTERS])
            self._on_text()

    async def apush_text(self, text: str) -> None:
        """As `push_text`, for asyncio: a long text is tokenised on another thread."""
        if len(text) > MAX_BLOCKING_CHARACTERS:
            await asyncio.to_thread(self.push_text, text)
        else:
            self.push_text(text)

    def flush(self) -> None:
        """Has the text pushed so far spoken to its end, for a pause of unknown length.

        Without it, a session in the `streaming` layout speaks one frame per token and then waits
        for more text, which may be in the middle of a word. Later text is a segment of its own, as
        after a split of a long text: the voice is the same, and the intonation starts anew. Flush
        at ends of sentences or phrases. The beginning of a tag waits for the rest of it. Has no
        effect on text that was flushed or ended.
        """
        self._process.check()
        with self._text.lock:
            if not (self._text.text_ended or self._text.closed):
                self._text.flush()
        self._on_text()

    def end(self) -> None:
        """Ends the text; speech continues until all of it was spoken."""
        self._process.check()
        with self._text.lock:
            if not (self._text.text_ended or self._text.closed):
                self._text.end()
        self._on_text()

    def cancel(self) -> None:
        """Stops the speech; no chunk is read after this returns.

        The engine stops within one frame, or two while more than 36 streams make frames.

        Does nothing if the `Finish` was read, or in a forked process.
        """
        if self._finish is None and self._process.is_current:
            self._events.mute()
            self._events.abandon()

    def __iter__(self) -> Iterator[Event]:
        while self._finish is None:
            self._process.check()
            yield self._note_finish(self._events.get())

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        self._process.check()
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._events.set_waiter(loop, arrived)
        try:
            while self._finish is None:
                arrived.clear()
                event = self._events.get_nowait()
                if event is None:
                    await arrived.wait()
                else:
                    yield self._note_finish(event)
        finally:
            self._events.remove_waiter(arrived)

    def _note_finish(self, event: Event) -> Event:
        if isinstance(event, Finish):
            self._finish = event
        return event

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        if self._finish is None:  # else the engine, which has left the stream, would be woken
            self._events.abandon()  # takes no lock: a collector may run this within any code
