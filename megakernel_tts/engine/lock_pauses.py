"""Pauses of the engine thread in which other threads take the interpreter lock.

An event loop needs the lock for each callback. Python requests it from another thread only after
5 ms (`sys.getswitchinterval`). A release that is shorter than the wake-up of a thread, as within an
operation of torch, does not pass the lock on, and the 5 ms begin anew.

With few streams the work between two waits for the device is short, and a pause in it delays the
first chunk by 0.2 ms. So there are two pauses only: behind a stream's first chunk, for its reader,
and behind a step, if recognition on the same device waits.
"""

import time
from collections.abc import Callable

_MAX_HOLD_S = 1e-3  # of the lock, before a pause is due
_PAUSE_S = 50e-6  # a thread that waits for the lock wakes up within this time
_WAKE_UP_S = 2e-4  # a thread that has slept for longer wakes up within this time


class LockPauses:
    """Makes pauses when the thread has worked for some time without one.

    Attributes:
        few_open: Whether few streams are open, so that `pause` does nothing.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts as after a pause.

        Args:
            clock: Returns the time in seconds.
        """
        self.few_open = False
        self._clock = clock
        self._since_s = clock()

    def restart(self) -> None:
        """Records that the thread has waited, which released the lock."""
        self._since_s = self._clock()

    def pause_if_due(self) -> None:
        """Pauses if the last pause or wait was too long ago."""
        if self._clock() - self._since_s >= _MAX_HOLD_S:
            self.pause()

    def pause(self) -> None:
        """Pauses, unless few streams are open."""
        if not self.few_open:
            self.pause_always()

    def pause_for_reader(self) -> None:
        """Pauses for as long as a reader takes to wake up that has waited for its first chunk."""
        time.sleep(_WAKE_UP_S)
        self._since_s = self._clock()

    def pause_always(self) -> None:
        """Releases the lock for long enough that a thread that waits for it gets it."""
        time.sleep(_PAUSE_S)
        self._since_s = self._clock()
