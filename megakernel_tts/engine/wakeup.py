"""What other threads signal to the engine loop: wake-ups, and sessions that are being opened."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Wakeup:
    """A wake-up event for the loop. `set` takes no lock, so that a finaliser may call it."""

    def __init__(self) -> None:
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wakes the loop, or makes its next `wait` return at once."""
        self._signals.put(None)

    def clear(self) -> None:
        """Drops earlier signals."""
        with suppress(queue.Empty):
            while True:
                self._signals.get_nowait()

    def wait(self, timeout_s: float | None) -> None:
        """Waits for a signal, at most `timeout_s` seconds (None: without limit)."""
        with suppress(queue.Empty):
            self._signals.get(timeout=timeout_s)


class PendingOpens:
    """Counts the sessions that are being opened, on any thread."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Number of sessions that are being opened."""
        return self._count

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Counts one session for the duration of a `with` block."""
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                if not self._count:
                    self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        """Waits until no session is being opened, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count, timeout_s)
