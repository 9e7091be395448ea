"""Order of the work of several engines of a process on one GPU: short work comes first.

A launch of synthesis occupies every multiprocessor for several frames. A chunk of recognition is a
sequence of small kernels, so a launch that the GPU begins between two of them delays the chunk by
all its frames. Recognition therefore announces the chunks of live sessions: synthesis ends its
launch with the frame under way, and launches nothing before the chunks have been computed.

Both sides wait `_MAX_WAIT_S` at most. On a GPU that recognition alone keeps busy, synthesis gets
one frame in each of these intervals.
"""

import threading
from collections.abc import Callable
from functools import cache

import torch

_MAX_WAIT_S = 0.01  # longer than a frame of 64 streams; an eighth of what a frame's audio lasts


class DeviceArbiter:
    """The work under way on one GPU. Engines use it through `ShortWork` and `LongWork`.

    Attributes:
        changed: Guards the other attributes, and is notified when work ends.
        short: Short work that is announced or under way.
        long: Long work that is under way.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.short = set[ShortWork]()
        self.long = set[LongWork]()


class ShortWork:
    """An engine's work that others wait for."""

    def __init__(self, arbiter: DeviceArbiter) -> None:
        """Begins nothing.

        Args:
            arbiter: Of the GPU.
        """
        self._arbiter = arbiter

    def begin(self) -> bool:
        """Announces work and waits until no long work is under way, or `_MAX_WAIT_S` are over.

        May be repeated before `end`.

        Returns:
            Whether it waited.
        """
        arbiter = self._arbiter
        with arbiter.changed:
            arbiter.short.add(self)
            if not arbiter.long:
                return False
            for work in arbiter.long:
                work.interrupt()
            arbiter.changed.wait_for(lambda: not arbiter.long, _MAX_WAIT_S)
            return True

    def end(self) -> None:
        """Ends the work, if it was begun."""
        with self._arbiter.changed:
            self._arbiter.short.discard(self)
            self._arbiter.changed.notify_all()


class LongWork:
    """An engine's work that waits for short work.

    Attributes:
        interrupt: Has the work under way end soon, or the next if there is none; takes no lock.
    """

    def __init__(self, arbiter: DeviceArbiter, interrupt: Callable[[], None]) -> None:
        """Begins nothing.

        Args:
            arbiter: Of the GPU.
            interrupt: See the attribute.
        """
        self.interrupt = interrupt
        self._arbiter = arbiter

    @property
    def is_awaited(self) -> bool:
        """Whether short work is announced."""
        return bool(self._arbiter.short)

    @property
    def must_wait(self) -> bool:
        """Whether `begin` would wait."""
        return self.is_awaited and self not in self._arbiter.long

    def begin(self) -> None:
        """Begins work, unless it was begun, when no short work is left.

        If some is left after `_MAX_WAIT_S`, the work begins nevertheless and is interrupted.
        """
        arbiter = self._arbiter
        with arbiter.changed:
            if self in arbiter.long:
                return
            if not arbiter.changed.wait_for(lambda: not arbiter.short, _MAX_WAIT_S):
                self.interrupt()
            arbiter.long.add(self)

    def end(self) -> None:
        """Ends the work, if it was begun."""
        with self._arbiter.changed:
            self._arbiter.long.discard(self)
            self._arbiter.changed.notify_all()


def device_arbiter(device: torch.device) -> DeviceArbiter:
    """The arbiter of a device; every engine of the process that uses a GPU gets the same one.

    Args:
        device: The device. On a CPU, where the operating system shares the cores, each call
            returns another arbiter.
    """
    if device.type == "cpu":
        return DeviceArbiter()
    index = torch.cuda.current_device() if device.index is None else device.index
    return _gpu_arbiter(index)


@cache
def _gpu_arbiter(index: int) -> DeviceArbiter:
    return DeviceArbiter()
