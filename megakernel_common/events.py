"""Events of one session, from an engine thread to one reader: what every queue of them has."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

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
        self._on_abandon = on_abandon
        self.abandoned = False

    def abandon(self) -> None:
        """Has the engine end the stream. Takes no lock, so that a finaliser may call it."""
        self.abandoned = True
        self._on_abandon()
