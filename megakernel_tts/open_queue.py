"""Opens sessions on event loops: a few in each iteration of a loop, so that its timers are on time.

An open takes 0.1 ms, and longer while the engine thread has the interpreter lock. Without a limit,
64 requests that begin in one iteration would delay the loop by the sum.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple
from weakref import WeakKeyDictionary

from megakernel_tts.session import Session

_MAX_OPENS = 4  # in one iteration of an event loop


class _Waiting(NamedTuple):
    """A session that waits: what opens it, and the future that receives it."""

    open_session: Callable[[], Session]
    opened: asyncio.Future[Session]


class OpenQueue:
    """Sessions that are to be opened, on any number of event loops."""

    def __init__(self, announce: Callable[[], AbstractContextManager[None]]) -> None:
        """Starts without sessions.

        Args:
            announce: Returns a context in which the engine expects another session.
        """
        self._announce = announce
        # Of each event loop that opens sessions at present, those that wait, in order.
        self._waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[_Waiting]] = (
            WeakKeyDictionary()
        )

    async def open(self, open_session: Callable[[], Session]) -> Session:
        """Opens a session: at once if no other was opened in this iteration, else in a later one.

        Args:
            open_session: Called on the running event loop, unless the task is cancelled before.
        """
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(loop)
        if waiting is None:
            self._waiting[loop] = deque()
            loop.call_soon(self._open_next, loop)
            return open_session()
        opened: asyncio.Future[Session] = loop.create_future()
        waiting.append(_Waiting(open_session, opened))
        with self._announce():
            return await opened

    def _open_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Opens sessions that wait; runs in each iteration until none is left."""
        waiting = self._waiting[loop]
        if not waiting:
            del self._waiting[loop]
            return
        loop.call_soon(self._open_next, loop)
        num_left = _MAX_OPENS
        while waiting and num_left:
            open_session, opened = waiting.popleft()
            if opened.done():  # its task was cancelled
                continue
            num_left -= 1
            try:
                opened.set_result(open_session())
            except Exception as error:
                opened.set_exception(error)
