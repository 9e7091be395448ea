"""Which process an engine and torch belong to, and how an engine's thread ends with it.

A process that was forked can use neither the engine nor torch of its parent.

Of the threads of a process, a forked one has only the thread that forked. The engine thread and
torch's thread pool are missing there, and waiting for them would never end.
"""

import atexit
import os
import sys
import threading
import weakref
from functools import cache, partial
from typing import Protocol

from megakernel_common.errors import ForkedProcessError

_USE_SPAWN = "Start processes with multiprocessing.get_context('spawn')"

# By other code, which may have started torch's thread pool: its threads cannot be distinguished.
_TORCH_WAS_IMPORTED = "torch" in sys.modules


class Stoppable(Protocol):
    """A loop that a thread runs."""

    def stop(self) -> None:
        """Ends the loop soon; takes no lock."""


class _Forks:
    """Counts the forks from the first process to this one.

    Unlike the process's id, the count is read without a system call. A fork by C code that does not
    call Python's hooks is not counted.
    """

    count = 0

    @classmethod
    def add(cls) -> None:
        """Counts a fork, in the forked process."""
        cls.count += 1


os.register_at_fork(after_in_child=_Forks.add)


class OwnerProcess:
    """The process in which an object was made."""

    def __init__(self, loaded: str = "TTS") -> None:
        """Records the current process.

        Args:
            loaded: The class of which an object was loaded, for the message.
        """
        self._forks = _Forks.count
        self._loaded = loaded

    @property
    def is_current(self) -> bool:
        """Whether this is that process, not one forked from it."""
        return self._forks == _Forks.count

    def check(self) -> None:
        """Checks that the object can be used here.

        Raises:
            ForkedProcessError: This process was forked after the object was made.
        """
        if not self.is_current:
            raise ForkedProcessError(
                f"The {self._loaded} was loaded before this process was forked, and its engine "
                f"runs in the parent only. {_USE_SPAWN}, and load one in each."
            )


def check_torch() -> None:
    """Checks that torch can be used in this process, and records that it is.

    Raises:
        ForkedProcessError: This process was forked after torch had run in its parent, or may have
            run, because torch was imported before this package.
    """
    import torch

    if _torch_process() != os.getpid() or torch.cuda._is_in_bad_fork():
        raise ForkedProcessError(
            "Torch ran, or may have run, before this process was forked, and its threads run only "
            f"in the parent. {_USE_SPAWN}, or import megakernel_tts before torch and fork before "
            "torch is used."
        )


@cache
def _torch_process() -> int:
    """The id of the process in which torch was first used; a forked process inherits it."""
    return os.getpid()


@cache
def detect_forks() -> None:
    """Detects forks after other code has used torch; call it when torch is imported."""
    at_import = frozenset[int]() if _TORCH_WAS_IMPORTED else _native_threads()
    os.register_at_fork(before=partial(_before_fork, at_import))


def _before_fork(at_import: frozenset[int]) -> None:
    """Records that torch was used if its thread pool may have been started since the import."""
    import torch

    pool_size = torch.get_num_threads() - 1  # the caller is the pool's other thread
    if 0 < pool_size <= len(_native_threads() - at_import):
        _torch_process()


def _native_threads() -> frozenset[int]:
    """The ids of the threads that were not started by Python; none where there is no /proc."""
    try:
        threads = {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return frozenset()
    return frozenset(threads - {thread.native_id for thread in threading.enumerate()})


def end_at_exit(loop: Stoppable, thread: threading.Thread) -> None:
    """Has the interpreter stop a loop and join its thread when it exits.

    A thread that is still inside torch when the interpreter is finalised aborts the process. The
    thread may be inside torch until its end, because it frees what the loop owns. The registration
    therefore lasts as long as the `Thread` object, which the thread frees last. It holds weak
    references only.

    Args:
        loop: An engine's loop.
        thread: The thread that runs it.
    """
    end = partial(_end, weakref.ref(loop), weakref.ref(thread))
    atexit.register(end)
    weakref.finalize(thread, atexit.unregister, end).atexit = False


def _end(loop: weakref.ref[Stoppable], thread: weakref.ref[threading.Thread]) -> None:
    """Stops a loop, if it is alive, and joins its thread."""
    if (alive := loop()) is not None:
        alive.stop()
    del alive  # freed here, if this was the last reference, else by the thread
    if (running := thread()) is not None:
        running.join()
