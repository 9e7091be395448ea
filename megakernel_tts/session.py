"""One stream of speech as its user sees it: text goes in, events come out."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.align.words import Word
from megakernel_tts.checks import check_text
from megakernel_tts.errors import SynthesisError, TextError

if TYPE_CHECKING:
    from megakernel_tts.text.text_queue import TextQueue

FinishReason = Literal["eos", "length", "guard", "cancelled", "error"]

PORTION = 4096  # characters tokenised before the engine may look at them


@dataclass(frozen=True)
class AudioChunk:
    """A few frames of speech.

    Attributes:
        pcm: [samples], 16-bit.
        sample_rate: Samples a second.
        codes: [frames, groups]: what the samples were decoded from.
        frame: The number of its first frame in the stream.
        words: Those that begin in it, and may be left over at the end of the text, in order.
    """

    pcm: NDArray[np.int16]
    sample_rate: int
    codes: NDArray[np.int64]
    frame: int
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Finish:
    """The last event of every stream.

    Attributes:
        reason: `eos`: all was said. `length`: a piece of the text reached max_frames or the end of
            its slot. `guard`: a piece ran away and was stopped. `cancelled`, `error`.
        frames: Delivered in all, also those that nobody read after a cancellation.
        error: What went wrong, with the reason `error`; what it came from is its cause.
    """

    reason: FinishReason
    frames: int
    error: SynthesisError | None = None


Event = AudioChunk | Finish


@dataclass(frozen=True)
class ChunkPolicy:
    """How many frames leave together: `first`, then twice as many each time, up to `largest`.

    Attributes:
        first: Frames of the first chunk; 1 gives the earliest sound.
        largest: Frames of a chunk at most; larger ones cost less to decode.
        ahead: Frames made but not read after which the stream pauses until some are read.
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


class EventQueue:
    """Events on their way from the engine's thread to one reader."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        self._events: deque[Event] = deque()
        self._arrived = threading.Condition()
        self._on_read = on_read
        self._on_put: Callable[[], object] | None = None
        self._muted = False
        self.unread = 0  # frames

    def put(self, event: Event) -> None:
        """Delivers an event; called by the engine."""
        with self._arrived:
            if isinstance(event, AudioChunk):
                if self._muted:
                    return
                self.unread += len(event.codes)
            self._events.append(event)
            self._arrived.notify_all()
            wake = self._on_put
        if wake is not None:
            wake()

    def mute(self) -> None:
        """Drops the audio that was not read, and all that will come; the finish stays."""
        with self._arrived:
            self._muted = True
            self._events = deque(e for e in self._events if isinstance(e, Finish))
            self.unread = 0

    def take(self) -> Event | None:
        """The next event, if there is one; the finish stays for whoever asks again."""
        with self._arrived:
            event = self._events[0] if self._events else None
            if isinstance(event, AudioChunk):
                self._events.popleft()
                self.unread -= len(event.codes)
        if event is not None:
            self._on_read()
        return event

    def wait(self) -> Event:
        """The next event, waiting for it."""
        while (event := self.take()) is None:
            with self._arrived:
                self._arrived.wait_for(lambda: bool(self._events))
        return event

    def notify(self, wake: Callable[[], object]) -> None:
        """Calls `wake` from the engine's thread after every delivery, and nobody else."""
        with self._arrived:
            self._on_put = wake

    def forget(self, wake: Callable[[], object]) -> None:
        """Calls `wake` no more; whoever came after it is still called."""
        with self._arrived:
            if self._on_put is wake:
                self._on_put = None


class Session:
    """A stream of speech: push text, end it, and iterate over the events (or asynchronously).

    The iteration ends after the `Finish`. A session that is dropped or whose `with` block is left
    cancels itself.
    """

    def __init__(
        self,
        script: "TextQueue",
        mailbox: EventQueue,
        wake: Callable[[], None],
        abandon: Callable[[], None],
    ) -> None:
        self._script = script
        self._mailbox = mailbox
        self._wake = wake
        self._abandon = abandon
        self._finish: Finish | None = None

    @property
    def finish(self) -> Finish | None:
        """The stream's last event, once it was read."""
        return self._finish

    def push_text(self, text: str) -> None:
        """Adds text to be spoken; without effect once the stream is over.

        Raises:
            TextError: It is no Unicode text, or the text was ended.
        """
        check_text(text)
        for start in range(0, len(text), PORTION):
            with self._script.lock:
                if self._script.ended:
                    raise TextError("The session's text was ended; open a new session for more.")
                if self._script.closed:
                    return
                self._script.push(text[start : start + PORTION])
            self._wake()

    def end(self) -> None:
        """Says that no more text will come; speech goes on to its end."""
        with self._script.lock:
            if not (self._script.ended or self._script.closed):
                self._script.end()
        self._wake()

    def cancel(self) -> None:
        """Stops the speech within one frame; no chunk is read after this returns."""
        self._mailbox.mute()
        self._abandon()

    def __iter__(self) -> Iterator[Event]:
        while self._finish is None:
            yield self._seen(self._mailbox.wait())

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(arrived.set)

        self._mailbox.notify(wake)
        try:
            while self._finish is None:
                arrived.clear()
                event = self._mailbox.take()
                if event is None:
                    await arrived.wait()
                else:
                    yield self._seen(event)
        finally:
            self._mailbox.forget(wake)

    def _seen(self, event: Event) -> Event:
        if isinstance(event, Finish):
            self._finish = event
        return event

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._abandon()  # takes no lock: this may run within any code of any thread
