"""Why a step ends with the frame under way.

A session that is opened while prompts run is often read from the queue before the next step, which
then need not be short: the streams of a burst would make one frame, and the rest in a further step.

With many streams, sessions are opened and cancelled so often that steps which end then would make
fewer frames than are played. Such a step is a shared one (`DeadlineScheduler.shared_frames`).
"""

from collections.abc import Callable

from megakernel_common.process import OwnerProcess
from megakernel_tts.backends.protocol import Backend


class Interrupts:
    """Ends the backend's steps early, and wakes the loop.

    Any thread may call `interrupt`, `interrupt_unless_shared` and `note_opened`. They take no lock,
    and do nothing in a forked process, where finalisers call them and the GPU's memory is missing.
    The flags are set before the backend is interrupted.

    Attributes:
        step_is_shared: Whether only `interrupt` ends the next step early.
    """

    def __init__(self, backend: Backend, wake: Callable[[], None]) -> None:
        """Starts without an interruption.

        Args:
            backend: Makes the steps.
            wake: Wakes the loop.
        """
        self.step_is_shared = False
        self._process = OwnerProcess()
        self._backend, self._wake = backend, wake
        self._interrupted = self._interrupted_unless_shared = self._session_opened = False

    def interrupt(self) -> None:
        """Has the step under way, or the next one, end with a frame."""
        if self._process.is_current:
            self._interrupted = True
            self._backend.interrupt()
            self._wake()

    def interrupt_unless_shared(self) -> None:
        """As `interrupt`, unless the step is a shared one."""
        if self._process.is_current:
            self._interrupted_unless_shared = True
            self._announce()

    def note_opened(self) -> None:
        """As `interrupt_unless_shared`, unless the loop reads the queue before the next step.

        Only for a session that waits for a slot: the queue of streams has no others.
        """
        if self._process.is_current:
            self._session_opened = True
            self._announce()

    def _announce(self) -> None:
        if not self.step_is_shared:
            self._backend.interrupt()
        self._wake()

    def clear(self) -> None:
        """Ends the effect of all interruptions, before the loop looks at everything."""
        self._interrupted = self._interrupted_unless_shared = self._session_opened = False
        self.step_is_shared = False
        self._backend.clear_interrupt()

    def note_reading(self) -> None:
        """Records that the loop reads the queue of streams, before it does."""
        self._session_opened = False

    def drop_opened(self) -> None:
        """Lets the next step be long if only sessions that were read, or share it, would end it."""
        if self._ends_step:
            return
        self._backend.clear_interrupt()
        if self._ends_step:  # meanwhile: the backend's flag was cleared
            self._backend.interrupt()

    @property
    def _ends_step(self) -> bool:
        has_event = self._session_opened or self._interrupted_unless_shared
        return self._interrupted or (has_event and not self.step_is_shared)
