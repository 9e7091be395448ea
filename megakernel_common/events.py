"""Events of sessions, from an engine thread to their readers: what all queues of them have."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

E = TypeVar("E")


class BaseEventQueue(Generic[E]):
    """What the queue of a session has on both sides.

    Attributes:
        abandoned: Whether the reader has cancelled or dropped the session.
    """

    def __init__(self, on_abandon: Callable[[], None]) -> None:
        """Creates an empty queue.

        Args:
            on_abandon: Called when the session is abandoned; must not take a lock.
        """
        self._events: deque[E] = deque()
        # Used without the condition where nothing waits: its `with` calls functions in Python.
        self._lock = threading.RLock()  # a finaliser may close a reader while its thread holds it
        self._changed = threading.Condition(self._lock)
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._on_abandon = on_abandon
        self.abandoned = False

    def abandon(self) -> None:
        """Has the engine end the stream. Takes no lock, so that a finaliser may call it."""
        self.abandoned = True
        self._on_abandon()

    def notify(self) -> asyncio.AbstractEventLoop | None:
        """Wakes a waiting thread; returns the event loop of a waiting task, if there is one."""
        with self._lock:
            self._changed.notify_all()
            return self._waiter[0] if self._waiter is not None else None

    def set_arrived(self) -> None:
        """Wakes the waiting task, if there is one; called on its event loop."""
        if (waiter := self._waiter) is not None:
            waiter[1].set()

    def set_waiter(self, loop: asyncio.AbstractEventLoop, arrived: asyncio.Event) -> None:
        """Has `arrived` set on its event loop after new events; replaces an earlier one."""
        with self._lock:
            self._waiter = loop, arrived

    def remove_waiter(self, arrived: asyncio.Event) -> None:
        """Removes a waiter, unless another one has replaced it."""
        with self._lock:
            if self._waiter is not None and self._waiter[1] is arrived:
                self._waiter = None


class ReaderWakeups:
    """Wakes the readers of sessions: each one once for all events since the last call of `wake`.

    A wake-up of an event loop is a system call, which costs more than the delivery of an event, and
    releases the interpreter lock. All tasks of an event loop share one. One thread calls the
    methods.
    """

    def __init__(self) -> None:
        """Starts without events."""
        self._queues: dict[BaseEventQueue[Any], None] = {}

    def add(self, queue: BaseEventQueue[Any]) -> None:
        """Records that a queue has a new event."""
        self._queues[queue] = None

    def wake(self) -> None:
        """Wakes the readers of the queues with new events.

        A session whose reader's event loop is closed is abandoned.
        """
        queues, self._queues = self._queues, {}
        arrived: dict[asyncio.AbstractEventLoop, list[BaseEventQueue[Any]]] = {}
        for queue in queues:
            if (loop := queue.notify()) is not None:
                arrived.setdefault(loop, []).append(queue)
        for loop, queues_of_loop in arrived.items():
            try:
                loop.call_soon_threadsafe(_set_arrived, queues_of_loop)
            except RuntimeError:
                for queue in queues_of_loop:
                    queue.abandon()


def _set_arrived(queues: Sequence[BaseEventQueue[Any]]) -> None:
    """Wakes the tasks that wait for events; runs on their event loop."""
    for queue in queues:
        queue.set_arrived()
