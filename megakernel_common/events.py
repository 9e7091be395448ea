"""Events of one session, from an engine thread to one reader: what every queue of them has."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")


class BaseEventQueue(Generic[E]):
    """A queue whose reader may be a thread or, through a listener, an event loop.

    Attributes:
        abandoned: Whether the reader has cancelled or dropped the session.
    """

    def __init__(self, on_abandon: Callable[[], None]) -> None:
        """Creates an empty queue.

        Args:
            on_abandon: Called when the session is abandoned; must not take a lock.
        """
        self._events: deque[E] = deque()
        self._changed = threading.Condition()
        self._on_abandon = on_abandon
        self._listener: Callable[[], object] | None = None
        self.abandoned = False

    def abandon(self) -> None:
        """Has the engine end the stream. Takes no lock, so that a finaliser may call it."""
        self.abandoned = True
        self._on_abandon()

    def set_listener(self, listener: Callable[[], object]) -> None:
        """Has `listener` called after every event, on the engine thread; replaces an earlier one.

        Args:
            listener: Called without arguments.
        """
        with self._changed:
            self._listener = listener

    def remove_listener(self, listener: Callable[[], object]) -> None:
        """Removes `listener`, unless another one has replaced it."""
        with self._changed:
            if self._listener is listener:
                self._listener = None
