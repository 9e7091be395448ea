"""An event loop on a virtual clock: conversations of many seconds run as fast as they compute.

The clock stands still while the event loop, an engine or an executor job has work, and then jumps
to the next timer. Processing therefore takes no virtual time, however busy the machine is, and the
times that a test observes are exact.
"""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch
from weakref import WeakSet

from pipecat.clocks.base_clock import BaseClock

from megakernel_common.wakeup import Wakeup

T = TypeVar("T")

TIMEOUT_S = 300.0  # real time after which work that does not end fails a test
_POLL_INTERVAL_S = 0.0005  # real time between two looks at a busy engine


class ObservableWakeup(Wakeup):
    """A wakeup that reports whether its thread waits for it. See `observable_engines`."""

    _instances: ClassVar[WeakSet["ObservableWakeup"]] = WeakSet()
    _instances_lock: ClassVar = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()  # reentrant: a finaliser may call `set` at any time
        self._is_set = False
        self._waiting = False
        self._thread: threading.Thread | None = None
        with self._instances_lock:
            self._instances.add(self)

    @classmethod
    def all_idle(cls) -> bool:
        """Whether every engine waits to be woken up, or has ended."""
        with cls._instances_lock:
            return all(wakeup._idle for wakeup in cls._instances)

    @property
    def _idle(self) -> bool:
        with self._changed:
            ended = self._thread is not None and not self._thread.is_alive()
            return ended or (self._waiting and not self._is_set)

    def set(self) -> None:
        """See `Wakeup.set`."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """See `Wakeup.clear`."""
        with self._changed:
            self._thread = threading.current_thread()
            self._is_set = False

    def wait(self, timeout_s: float | None) -> None:
        """See `Wakeup.wait`."""
        with self._changed:
            self._waiting = True
            self._changed.wait_for(lambda: self._is_set, timeout_s)
            self._waiting = False


@contextmanager
def observable_engines() -> Iterator[None]:
    """Virtual time stands still while an engine works that was loaded in this context."""
    with (
        patch("megakernel_tts.engine.loop.Wakeup", ObservableWakeup),
        patch("megakernel_stt.engine.engine.Wakeup", ObservableWakeup),
    ):
        yield


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers run on a virtual clock."""

    def __init__(self) -> None:
        self._now = 0.0
        self._num_jobs = 0
        super().__init__(_VirtualTimeSelector(self._is_idle, self._advance))
        self._executor = ThreadPoolExecutor()
        self.set_default_executor(self._executor)

    def time(self) -> float:
        """Returns the virtual time in seconds."""
        return self._now

    def _advance(self, seconds: float) -> None:
        self._now += seconds

    def _is_idle(self) -> bool:
        return not self._num_jobs and ObservableWakeup.all_idle()

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Runs a job on a thread; the clock stands still meanwhile."""
        job = (executor or self._executor).submit(func, *args)
        self._num_jobs += 1
        future = asyncio.wrap_future(job, loop=self)
        # A job whose future was cancelled counts until its thread has ended.
        job.add_done_callback(lambda _: self.call_soon_threadsafe(self._end_job))
        return future

    def _end_job(self) -> None:
        self._num_jobs -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Waits for the executor's threads; the clock stands still meanwhile.

        Args:
            timeout: Has no effect: the limit that Python 3.12 sets would pass in virtual time.
        """
        self._num_jobs += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._end_job()


class _VirtualTimeSelector(selectors.SelectSelector):
    """Waits for files in real time, and for timers in virtual time once nothing has work."""

    def __init__(self, is_idle: Callable[[], bool], advance: Callable[[float], None]) -> None:
        super().__init__()
        self._is_idle = is_idle
        self._advance = advance

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._is_idle():
            if events := super().select(_POLL_INTERVAL_S):
                return events
            assert time.monotonic() < deadline_s, "an engine or a job does not end"
        events = super().select(0)  # from work that has just ended
        if not events:
            self._advance(timeout)
        return events


class VirtualClock(BaseClock):
    """Pipecat's clock on the time of the running event loop."""

    def get_time(self) -> int:
        """Returns the virtual time in nanoseconds."""
        return round(asyncio.get_running_loop().time() * 1e9)

    def start(self) -> None:
        """Has no effect: the event loop's clock already runs."""


def run_in_virtual_time(main: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Runs a coroutine in an event loop of its own.

    Args:
        main: The coroutine.
        timeout_s: Virtual time that it may take.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(asyncio.wait_for(main, timeout_s))
