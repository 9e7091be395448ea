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
        self._streams: list[Stream] = []
        self._process = OwnerProcess("STT")

    def add(self, stream: Stream, slots: int, *, wait: bool) -> None:
        """Adds a stream if a slot is free.

        Args:
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
            self._streams.append(stream)

    @property
    def _num_used(self) -> int:
        """Slots in use; the lock must be held."""
        return sum(stream.holds_slot for stream in self._streams)

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
        for stream in self._current():
            self._remove(stream, closing)
        with self._lock:
            self._lock.notify_all()

    def _current(self) -> list[Stream]:
        with self._lock:
            return list(self._streams)

    def _iterate(self) -> bool:
        """Computes a chunk of every stream that has one.

        Returns:
            Whether there was any.
        """
        groups: dict[Recogniser, list[tuple[Stream, Recognition[Any]]]] = {}
        for stream in self._current():
            if stream.abandoned:
                self._remove(stream)
                continue
            try:
                chunk = stream.next_chunk()
            except Exception as error:
                self._fail(stream, error)
                continue
            if stream.finished:
                self._remove(stream)
            elif chunk is not None:
                groups.setdefault(stream.recogniser, []).append((stream, chunk))
        for recogniser, ready in groups.items():
            for i in range(0, len(ready), _MAX_BATCH):
                self._step(recogniser, ready[i : i + _MAX_BATCH])
        return bool(groups)

    def _step(self, recogniser: Recogniser, ready: list[tuple[Stream, Recognition[Any]]]) -> None:
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
        for stream, _ in ready:
            stream.report()

    def _fail(self, stream: Stream, cause: Exception) -> None:
        error = RecognitionError(f"The stream failed: {cause}")
        error.__cause__ = cause
        self._remove(stream, error)

    def _remove(
        self, stream: Stream, error: RecognitionError | EngineClosedError | None = None
    ) -> None:
        """Ends a stream and frees its slot."""
        stream.finish(error)
        with self._lock:
            self._streams.remove(stream)
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
            stream = make(inbox, events)
        self._loop.add(stream, self.slots, wait=wait)
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
