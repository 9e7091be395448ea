"""What the loop waits for: a ring, and sessions on their way."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Wakeup:
    """Wakes the loop. `set` takes no lock, so that it may be called from a finaliser."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wakes the loop now, or keeps it from falling asleep."""
        self._rings.put(None)

    def clear(self) -> None:
        """Forgets earlier rings."""
        with suppress(queue.Empty):
            while True:
                self._rings.get_nowait()

    def wait(self, seconds: float | None) -> None:
        """Sleeps until it rings, or for so long."""
        with suppress(queue.Empty):
            self._rings.get(timeout=seconds)


class Arrivals:
    """Knows how many sessions are being opened, on whatever threads."""

    def __init__(self) -> None:
        self._coming = 0
        self._none = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[None]:
        """While a session is being opened."""
        with self._none:
            self._coming += 1
        try:
            yield
        finally:
            with self._none:
                self._coming -= 1
                if not self._coming:
                    self._none.notify()

    def wait(self, seconds: float) -> None:
        """Waits until none is, or for so long."""
        with self._none:
            self._none.wait_for(lambda: not self._coming, seconds)
