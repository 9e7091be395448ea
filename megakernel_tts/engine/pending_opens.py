"""What other threads signal to the engine loop: sessions that are being opened."""

import threading
from collections.abc import Callable


class PendingOpens:
    """Counts the sessions that are being opened, on any thread: each in a `with` block."""

    def __init__(self, on_first: Callable[[], object]) -> None:
        """Starts with none.

        Args:
            on_first: Called when a session is being opened and no other is.
        """
        self._on_first = on_first
        self._count = 0
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Number of sessions that are being opened."""
        return self._count

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1
            is_first = self._count == 1
        if is_first:
            self._on_first()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            if not self._count:
                self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        """Waits until no session is being opened, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count, timeout_s)
