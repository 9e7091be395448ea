"""Wakes an engine's loop from other threads."""

import queue
from contextlib import suppress


class Wakeup:
    """A wake-up event for the loop. `set` takes no lock, so that a finaliser may call it."""

    def __init__(self) -> None:
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wakes the loop, or makes its next `wait` return at once."""
        self._signals.put(None)

    def clear(self) -> None:
        """Drops earlier signals."""
        while not self._signals.empty():  # the loop is the only one that takes signals
            self._signals.get_nowait()

    def wait(self, timeout_s: float | None) -> None:
        """Waits for a signal, at most `timeout_s` seconds (None: without limit)."""
        with suppress(queue.Empty):
            self._signals.get(timeout=timeout_s)
