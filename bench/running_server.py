"""A server that runs in a thread of this process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from megakernel_tts.server.app import Server
from megakernel_tts.server.serving import Certificate, authority, bind, uvicorn_config

_TIMEOUT_S = 300.0  # far longer than a busy machine takes to start or stop a server


@contextmanager
def served(server: Server, certificate: Certificate | None = None) -> Iterator[str]:
    """Serves an application on a free loopback port until the block ends; yields host and port."""
    with bind("127.0.0.1", 0) as listener:
        runner = uvicorn.Server(uvicorn_config(server, certificate))
        thread = threading.Thread(target=runner.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: runner.started)
            yield authority(listener)
        finally:
            runner.should_exit = True
            thread.join(_TIMEOUT_S)


def free_port() -> int:
    """A loopback port that no one uses."""
    with bind("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def wait_until(
    condition: Callable[[], bool], timeout_s: float = _TIMEOUT_S, interval_s: float = 0.001
) -> None:
    """Waits for a condition on another thread's or process's state, which has no event.

    Args:
        condition: Is read repeatedly.
        timeout_s: Seconds to wait at most.
        interval_s: Seconds between two reads.

    Raises:
        TimeoutError: It does not become true in time.
    """
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"the condition does not become true in {timeout_s:.0f} s")
        time.sleep(interval_s)
