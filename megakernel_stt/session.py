"""The public side of one stream: audio goes in, events come out."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megakernel_common.errors import MegakernelTTSError
from megakernel_common.events import BaseEventQueue, ReaderWakeups
from megakernel_common.process import OwnerProcess
from megakernel_stt.audio import Pcm, Samples, copy_pcm
from megakernel_stt.errors import AudioError
from megakernel_stt.transcript import Transcript

Request = Literal["finalize", "end"]

_ROUNDING_S = 1e-6  # of sums of seconds; less than a sample


@dataclass(frozen=True)
class Partial:
    """What was recognised so far. Its tokens do not change; more follow.

    Attributes:
        transcript: Of all audio of the session that is decoded.
    """

    transcript: Transcript


@dataclass(frozen=True)
class Final:
    """The answer to `finalize` or `end`: what the model recognises if the audio ends there.

    Attributes:
        transcript: Of all audio of the session before the call.
        is_last: Whether it answers `end`; the iteration is over after it.
    """

    transcript: Transcript
    is_last: bool


Event = Partial | Final


class Packet(NamedTuple):
    """Audio of one call of `push`.

    Attributes:
        samples: Of one channel.
        sample_rate: In Hz.
    """

    samples: Samples
    sample_rate: int


class Inbox:
    """Audio and requests of one session in order, from its caller to the engine thread.

    The engine sets how much audio it needs, and is not woken before so much waits: with many
    streams, its wake-ups for every packet would take longer than the chunks. Samples and sampling
    rate wait as two entries: a tuple for each packet would make the garbage collector run often.
    """

    def __init__(self, on_input: Callable[["Inbox"], None]) -> None:
        """Creates an empty inbox.

        Args:
            on_input: Called when there is a request, or as much audio as the engine needs; once
                until `get` has returned None. It must not call the inbox.
        """
        self._entries: deque[Samples | int | Request] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._on_input = on_input
        self._ended = False
        self._closed = False
        self._waiting_s = 0.0
        self._needed_s = 0.0
        self._num_requests = 0
        self._is_reported = False

    def put_audio(self, samples: Samples, sample_rate: int) -> None:
        """Adds samples of one channel; ignored once the stream has finished.

        Args:
            samples: Nothing may change them.
            sample_rate: In Hz.

        Raises:
            AudioError: The audio was ended.
        """
        with self._lock:
            if self._is_closed():
                return
            self._entries.extend((samples, sample_rate))  # one call: no signal comes in between
            self._waiting_s += _seconds(samples, sample_rate)
            if self._waiting_s > self._needed_s - _ROUNDING_S:
                self._report()

    def put_request(self, request: Request) -> None:
        """Adds a request; ignored once the stream has finished.

        Raises:
            AudioError: The audio was ended.
        """
        with self._lock:
            if self._is_closed():
                return
            self._entries.append(request)
            self._ended = request == "end"
            self._num_requests += 1
            self._report()

    def _report(self) -> None:
        """Calls `on_input` if `get` has returned None since the last call; the lock is held."""
        if not self._is_reported:
            self._on_input(self)
            self._is_reported = True  # not before: a call that a signal interrupts is repeated

    def _is_closed(self) -> bool:
        """Whether entries are ignored; the lock must be held.

        Raises:
            AudioError: The audio was ended.
        """
        if self._ended:
            raise AudioError("The session's audio was ended; open a new session for more.")
        return self._closed

    def get(self, needed_s: float) -> list[Packet] | Request | None:
        """Takes the next request, or packets before it.

        Args:
            needed_s: Seconds of audio that the engine needs. It gets no packet more, at least one.

        Returns:
            None if there is no request and less audio than needed. `on_input` is called once that
            has changed.
        """
        with self._lock:
            self._needed_s = needed_s
            is_due = self._num_requests > 0 or self._waiting_s > needed_s - _ROUNDING_S
            if not self._entries or not is_due:
                self._is_reported = False
                return None
            packets, taken_s = list[Packet](), 0.0
            while self._entries and (not packets or taken_s < needed_s - _ROUNDING_S):
                entry = self._entries[0]
                if isinstance(entry, str):
                    break
                samples, sample_rate = self._entries.popleft(), self._entries.popleft()
                assert not isinstance(samples, str | int) and isinstance(sample_rate, int)
                packets.append(Packet(samples, sample_rate))
                taken_s += _seconds(samples, sample_rate)
            self._waiting_s -= taken_s
            self._changed.notify_all()
            if packets:
                return packets
            self._num_requests -= 1
            request = self._entries.popleft()
            assert isinstance(request, str)
            return request

    def wait_below(self, seconds: float) -> None:
        """Waits until less audio than that waits for the engine, or the stream has finished."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting_s < seconds)

    def close(self) -> None:
        """Drops all entries and later ones."""
        with self._changed:
            self._closed = True
            self._entries.clear()
            self._changed.notify_all()


def _seconds(samples: Samples, sample_rate: int) -> float:
    """Duration of samples."""
    size = 2 if isinstance(samples, bytes) else 1
    return len(samples) // size / sample_rate


class EventQueue(BaseEventQueue[Event]):
    """Events of one session, from the engine thread to one reader."""

    def __init__(self, on_abandon: Callable[[], None], wakeups: ReaderWakeups) -> None:
        """Creates an empty queue.

        Args:
            on_abandon: Called when the session is abandoned; must not take a lock.
            wakeups: Receives the queue after each event; of the engine thread, which then wakes the
                readers.
        """
        super().__init__(on_abandon)
        self._wakeups = wakeups
        self._finished = False
        self._error: MegakernelTTSError | None = None

    def put(self, event: Event) -> None:
        """Appends an event. A partial result replaces an unread one, so the queue stays short."""
        with self._lock:
            if self._finished:
                return
            if (
                isinstance(event, Partial)
                and self._events
                and isinstance(self._events[-1], Partial)
            ):
                self._events.pop()
            self._events.append(event)
            self._finished = isinstance(event, Final) and event.is_last
        self._wakeups.add(self)

    def finish(self, error: MegakernelTTSError | None = None) -> None:
        """Ends the events, with an error that the reader gets after those in the queue."""
        with self._lock:
            if self._finished:
                return
            self._finished, self._error = True, error
        self._wakeups.add(self)

    def drop(self) -> None:
        """Drops unread and later events, and wakes the reader; called by any thread."""
        with self._lock:
            self._events.clear()
            self._finished, self._error = True, None
        wakeups = ReaderWakeups()
        wakeups.add(self)
        wakeups.wake()

    @property
    def is_ready(self) -> bool:
        """Whether `get` returns at once."""
        return bool(self._events) or self._finished

    def get(self) -> Event | None:
        """Waits for the next event and takes it; None after the last one.

        Raises:
            MegakernelTTSError: The stream failed, or the engine was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_ready)
            if self._events:
                return self._events.popleft()
            if self._error is not None:
                raise self._error
            return None


class Session:
    """A stream of audio: push packets, and iterate over the events (or asynchronously).

    The iteration ends after the `Final` of `end`, or when the session is cancelled. Dropping a
    session, or leaving its `with` block, cancels it.
    """

    def __init__(self, inbox: Inbox, events: EventQueue) -> None:
        """Connects the inbox and the event queue of one stream.

        Args:
            inbox: Read by the engine.
            events: Written by the engine.
        """
        self._inbox = inbox
        self._events = events
        self._process = OwnerProcess("STT")

    def push(self, pcm: Pcm, sample_rate: int) -> None:
        """Adds audio of one channel; without effect once the session has finished.

        The call copies the audio, except bytes, and returns; it never waits for the model.

        Args:
            pcm: 16-bit samples as bytes (little-endian) or integers [samples], or floats [samples]
                of full scale 1; any number of them.
            sample_rate: In Hz; it may change.

        Raises:
            AudioError: The audio has another type or shape, or was ended.
            ForkedProcessError: This process was forked after the session was opened.
        """
        self._process.check()
        self._inbox.put_audio(copy_pcm(pcm, sample_rate), sample_rate)

    def finalize(self) -> None:
        """Requests a `Final` of the audio so far, at once and independent of the lookahead.

        It is what the model recognises if the audio ended here. The stream itself continues as if
        this had not been called.

        Raises:
            AudioError: The audio was ended.
            ForkedProcessError: This process was forked after the session was opened.
        """
        self._process.check()
        self._inbox.put_request("finalize")

    def end(self) -> None:
        """Ends the audio; the last event is a `Final`. A second call has no effect."""
        self._process.check()
        try:
            self._inbox.put_request("end")
        except AudioError:
            return  # ended before

    def cancel(self) -> None:
        """Stops the stream after the chunk under way; no event is read after this returns.

        Does nothing in a forked process.
        """
        if self._process.is_current:
            self._events.abandon()
            self._events.drop()

    def __iter__(self) -> Iterator[Event]:
        self._process.check()
        while (event := self._events.get()) is not None:
            yield event

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        self._process.check()
        arrived = asyncio.Event()
        self._events.set_waiter(asyncio.get_running_loop(), arrived)
        try:
            while True:
                arrived.clear()
                if not self._events.is_ready:
                    await arrived.wait()
                elif (event := self._events.get()) is not None:
                    yield event
                else:
                    return
        finally:
            self._events.remove_waiter(arrived)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._events.abandon()  # takes no lock: a collector may run this within any code
