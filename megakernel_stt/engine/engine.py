"""The engine: its thread steps all streams together, each at its own phase.

An iteration takes the next chunk of every stream that has one, and computes those of the same
lookahead in one batch. Streams join and leave between iterations.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from megakernel_common.errors import EngineBusyError, EngineClosedError
from megakernel_common.process import OwnerProcess, end_at_exit
from megakernel_common.wakeup import Wakeup
from megakernel_stt.engine.recogniser import Recogniser, Recognition
from megakernel_stt.engine.stream import Stream
from megakernel_stt.errors import RecognitionError
from megakernel_stt.session import EventQueue, Inbox, Session

_MAX_BATCH = 64  # streams of a step

MakeStream = Callable[[Inbox, EventQueue], Stream]


class _Entry:
    """A stream and what its session holds."""

    def __init__(self, stream: Stream, inbox: Inbox, events: EventQueue) -> None:
        self.stream = stream
        self.inbox = inbox
        self.events = events

    @property
    def holds_slot(self) -> bool:
        """Whether the stream counts; it does not from just before its last event on."""
        return not (self.stream.finished or self.stream.abandoned)


class Loop:
    """The engine thread's work.

    Attributes:
        wakeup: Wakes the loop while it waits.
        closed: Ends the loop; set by any thread.
        broken: The error that ended the loop, if it was a defect.
    """

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.closed = False
        self.broken: BaseException | None = None
        self._lock = threading.Condition()
        self._entries: list[_Entry] = []
        self._process = OwnerProcess("STT")

    def add(self, entry: _Entry, slots: int, *, wait: bool) -> None:
        """Adds a stream if a slot is free.

        Args:
            entry: The stream.
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
            self._entries.append(entry)

    @property
    def _num_used(self) -> int:
        """Slots in use; the lock must be held."""
        return sum(entry.holds_slot for entry in self._entries)

    def stop(self) -> None:
        """Ends the loop after the step under way. Takes no lock: a finaliser may call it."""
        self.closed = True
        self.interrupt()

    def interrupt(self) -> None:
        """Wakes the loop. Takes no lock. Does nothing in a forked process."""
        if self._process.is_current:
            self.wakeup.set()

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
        closing = EngineClosedError("The engine was closed while the session was open.")
        closing.__cause__ = self.broken
        for entry in self._current():
            self._remove(entry, closing)
        with self._lock:
            self._lock.notify_all()

    def _current(self) -> list[_Entry]:
        with self._lock:
            return list(self._entries)

    def _iterate(self) -> bool:
        """Computes a chunk of every stream that has one.

        Returns:
            Whether there was any.
        """
        groups: dict[Recogniser, list[tuple[_Entry, Recognition[Any]]]] = {}
        for entry in self._current():
            if entry.stream.abandoned:
                self._remove(entry)
                continue
            try:
                chunk = entry.stream.next_chunk()
            except Exception as error:
                self._fail(entry, error)
                continue
            if entry.stream.finished:
                self._remove(entry)
            elif chunk is not None:
                groups.setdefault(entry.stream.recogniser, []).append((entry, chunk))
        for recogniser, ready in groups.items():
            for i in range(0, len(ready), _MAX_BATCH):
                self._step(recogniser, ready[i : i + _MAX_BATCH])
        return bool(groups)

    def _step(self, recogniser: Recogniser, ready: list[tuple[_Entry, Recognition[Any]]]) -> None:
        """Computes chunks together; if that fails, each solo, to find the stream at fault."""
        try:
            recogniser.step([chunk for _, chunk in ready])
        except Exception as error:
            if len(ready) == 1:
                self._fail(ready[0][0], error)
                return
            for one in ready:
                self._step(recogniser, [one])
            return
        for entry, _ in ready:
            entry.stream.report()

    def _fail(self, entry: _Entry, cause: Exception) -> None:
        error = RecognitionError(f"The stream failed: {cause}")
        error.__cause__ = cause
        self._remove(entry, error)

    def _remove(
        self, entry: _Entry, error: RecognitionError | EngineClosedError | None = None
    ) -> None:
        """Ends a stream and frees its slot."""
        entry.stream.finished = True
        entry.inbox.close()
        entry.events.finish(error)
        with self._lock:
            self._entries.remove(entry)
            self._lock.notify_all()


class Engine:
    """Runs the streams of one model.

    Attributes:
        slots: Number of streams at a time.
    """

    def __init__(self, slots: int) -> None:
        """Starts the thread.

        Args:
            slots: Number of streams at a time.
        """
        self.slots = slots
        self._process = OwnerProcess("STT")
        self._loop = Loop()
        self._thread = threading.Thread(
            target=self._loop.run, name="megakernel-stt-engine", daemon=True
        )
        self._thread.start()
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
        inbox, events = Inbox(self._loop.wakeup.set), EventQueue(self._loop.interrupt)
        with torch.inference_mode():
            entry = _Entry(make(inbox, events), inbox, events)
        self._loop.add(entry, self.slots, wait=wait)
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
