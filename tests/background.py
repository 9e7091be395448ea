"""Calls in threads of their own, and threads that wait for a device."""

import queue
import threading
from collections.abc import Callable

from megakernel_common.device_arbiter import DeviceArbiter
from tests.fakes import TIMEOUT_S


class Background:
    """A call in a thread of its own.

    Attributes:
        result: What it returned; None before.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.result = self._call()

    def join(self) -> None:
        """Waits for the end of the call."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "it does not return"


class Waits:
    """The waits of all threads at an arbiter."""

    def __init__(self, arbiter: DeviceArbiter) -> None:
        self._arbiter = arbiter
        self._begun = queue.SimpleQueue[None]()
        wait = arbiter.changed.wait

        def observed(timeout: float | None = None) -> bool:
            self._begun.put(None)
            return wait(timeout)

        arbiter.changed.wait = observed  # type: ignore[method-assign]

    def next(self) -> None:
        """Returns when the next thread waits."""
        self._begun.get(timeout=TIMEOUT_S)
        with self._arbiter.changed:  # which that thread has released
            pass
