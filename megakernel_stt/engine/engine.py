"""The engine: its thread steps all streams together, each at its own phase.

An iteration takes the next chunk of every stream that has one, and computes those of the same
lookahead in one batch. Streams join and leave between iterations. Only streams that have reported
input, or had a chunk in the iteration before, are looked at. As long as there are chunks of
live sessions, synthesis on the same device waits (`DeviceArbiter`).
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Container
from functools import partial
from typing import Any, NamedTuple

import torch

from megakernel_common.device_arbiter import DeviceArbiter, ShortWork
from megakernel_common.errors import EngineBusyError, EngineClosedError
from megakernel_common.events import ReaderWakeups
from megakernel_common.process import OwnerProcess, end_at_exit
from megakernel_common.threads import start_thread
from megakernel_common.wakeup import Wakeup
from megakernel_stt.engine.recogniser import Recogniser, Recognition
from megakernel_stt.engine.stream import Stream
from megakernel_stt.errors import RecognitionError
from megakernel_stt.session import EventQueue, Inbox, Session

_MAX_BATCH = 64  # streams of a step

MakeStream = Callable[[Inbox, EventQueue], Stream]


class Loop:
    """The engine thread's work.

    Attributes:
        wakeup: Wakes the loop while it waits.
        reader_wakeups: Wakes the readers of sessions after new events.
        closed: Ends the loop; set by any thread.
        broken: The error that ended the loop, if it was a defect.
    """

    def __init__(self, arbiter: DeviceArbiter) -> None:
        """Prepares the loop; `run` runs it.

        Args:
            arbiter: Of the device.
        """
        self.wakeup = Wakeup()
        self.reader_wakeups = ReaderWakeups()
        self.closed = False
        self.broken: BaseException | None = None
        self._lock = threading.Condition()
        self._streams: dict[Inbox, Stream] = {}
        self._reported = deque[Inbox]()  # inboxes of the streams to look at
        self._device_work = ShortWork(arbiter)
        self._process = OwnerProcess("STT")

    def add(self, inbox: Inbox, stream: Stream, slots: int, *, wait: bool) -> None:
        """Adds a stream if a slot is free.

        Args:
            inbox: Its input.
            stream: The stream.
            slots: Number of streams at a time.
            wait: Whether to wait for a slot.

        Raises:
            EngineBusyError: All slots are in use, and `wait` is false.
            EngineClosedError: The engine was closed or has failed.
        """
        with self._lock:
            if wait:
                self._lock.wait_for(lambda: self.closed or self._num_used < slots)
            if self.closed:
                raise EngineClosedError("The engine is closed; load a new one.") from self.broken
            if self._num_used >= slots:
                raise EngineBusyError(
                    f"{slots} sessions are open, as many as there are slots. Try again later, or "
                    "load with more slots."
                )
            self._streams[inbox] = stream

    @property
    def _num_used(self) -> int:
        """Slots in use; the lock must be held."""
        return sum(stream.holds_slot for stream in self._streams.values())

    def stop(self) -> None:
        """Ends the loop after the step under way. Takes no lock: a finaliser may call it."""
        self.closed = True
        if self._process.is_current:
            self.wakeup.set()

    def notify(self, inbox: Inbox) -> None:
        """Has the loop look at a stream. Takes no lock."""
        self._reported.append(inbox)
        self.wakeup.set()

    def abandon(self, inbox: Inbox) -> None:
        """Has the loop remove a stream without a reader. Takes no lock.

        Does nothing in a forked process.
        """
        if self._process.is_current:
            self.notify(inbox)

    @torch.inference_mode()
    def run(self) -> None:
        """Runs iterations until the loop is stopped, then ends every stream."""
        try:
            while True:
                self.wakeup.clear()
                if self.closed:  # read after the wake-up that announces it was cleared
                    break
                if not self._iterate():
                    self.wakeup.wait(None)
        except BaseException as error:  # a defect must not leave a session waiting
            self.broken = error
        self.closed = True
        self._device_work.end()
        closing = EngineClosedError("The engine was closed while the session was open.")
        closing.__cause__ = self.broken
        with self._lock:
            left = [*self._streams]
        for inbox in left:
            self._remove(inbox, closing)
        self.reader_wakeups.wake()
        with self._lock:
            self._lock.notify_all()

    def _take_reported(self) -> list[tuple[Inbox, Stream]]:
        """The streams to look at, in the order in which they were reported."""
        inboxes = dict[Inbox, None]()
        while self._reported:
            inboxes[self._reported.popleft()] = None
        with self._lock:
            return [(i, self._streams[i]) for i in inboxes if i in self._streams]

    def _iterate(self) -> bool:
        """Computes a chunk of every stream that has one.

        Returns:
            Whether there was any.
        """
        ready = self._take_ready({})
        if not any(one.stream.live for one in ready.values()):  # a recording can wait
            self._device_work.end()
        elif self._device_work.begin():
            ready |= self._take_ready(ready)  # those that came meanwhile share the steps
        groups = dict[Recogniser, list[_Ready]]()
        for one in ready.values():
            groups.setdefault(one.stream.recogniser, []).append(one)
        for recogniser, group in groups.items():
            for i in range(0, len(group), _MAX_BATCH):
                self._step(recogniser, group[i : i + _MAX_BATCH])
                self.reader_wakeups.wake()
        return bool(ready)

    def _take_ready(self, taken: Container[Inbox]) -> dict[Inbox, "_Ready"]:
        """Looks at the streams that have reported, and answers requests that need no chunk.

        Args:
            taken: Streams whose next chunk was taken already.

        Returns:
            The next chunks of the others.
        """
        ready = dict[Inbox, _Ready]()
        for inbox, stream in self._take_reported():
            if inbox in taken:  # it is looked at again after its chunk
                continue
            if stream.abandoned:
                self._remove(inbox)
                continue
            try:
                chunk = stream.next_chunk()
            except Exception as error:
                self._fail(inbox, error)
                continue
            if stream.finished:
                self._remove(inbox)
            elif chunk is not None:
                ready[inbox] = _Ready(inbox, stream, chunk)
        self.reader_wakeups.wake()  # results of requests do not wait for the chunks
        return ready

    def _step(self, recogniser: Recogniser, ready: list["_Ready"]) -> None:
        """Computes chunks together; if that fails, each solo, to find the stream at fault."""
        try:
            recogniser.step([one.chunk for one in ready])
        except Exception as error:
            if len(ready) == 1:
                self._fail(ready[0].inbox, error)
                return
            for one in ready:
                self._step(recogniser, [one])
            return
        for one in ready:
            one.stream.report()
            self._reported.append(one.inbox)  # it may have another chunk, or a request

    def _fail(self, inbox: Inbox, cause: Exception) -> None:
        error = RecognitionError(f"The stream failed: {cause}")
        error.__cause__ = cause
        self._remove(inbox, error)

    def _remove(
        self, inbox: Inbox, error: RecognitionError | EngineClosedError | None = None
    ) -> None:
        """Ends a stream and frees its slot."""
        self._streams[inbox].finish(error)
        with self._lock:
            del self._streams[inbox]
            self._lock.notify_all()


class _Ready(NamedTuple):
    """A stream with a chunk to compute."""

    inbox: Inbox
    stream: Stream
    chunk: Recognition[Any]


class Engine:
    """Runs the streams of one model.

    Attributes:
        slots: Number of streams at a time.
    """

    def __init__(
        self, slots: int, arbiter: DeviceArbiter, *, num_compute_threads: int | None = None
    ) -> None:
        """Starts the thread.

        Args:
            slots: Number of streams at a time.
            arbiter: Of the device.
            num_compute_threads: As in `start_thread`.
        """
        self.slots = slots
        self._process = OwnerProcess("STT")
        self._loop = Loop(arbiter)
        self._thread = start_thread(
            self._loop.run, "megakernel-stt-engine", num_compute_threads=num_compute_threads
        )
        end_at_exit(self._loop, self._thread)
        weakref.finalize(self, self._loop.stop).atexit = False

    def open(self, make: MakeStream, *, wait: bool = False) -> tuple[Session, Inbox]:
        """Opens a session.

        Args:
            make: Makes the stream.
            wait: Whether to wait for a slot.

        Returns:
            The session and its inbox.

        Raises:
            EngineBusyError: All slots are in use, and `wait` is false.
            EngineClosedError: The engine was closed or has failed.
            ForkedProcessError: This process was forked after the engine was made.
        """
        self._process.check()
        # They refer to the loop only: a reference to the engine would keep it alive.
        inbox = Inbox(self._loop.notify)
        events = EventQueue(partial(self._loop.abandon, inbox), self._loop.reader_wakeups)
        with torch.inference_mode():
            stream = make(inbox, events)
        self._loop.add(inbox, stream, self.slots, wait=wait)
        return Session(inbox, events), inbox

    @property
    def running(self) -> bool:
        """Whether the engine was neither closed nor has failed."""
        return not self._loop.closed

    def close(self) -> None:
        """Ends every session and stops the thread; may be called twice."""
        self._loop.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()
