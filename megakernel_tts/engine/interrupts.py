"""Why a step ends with the frame under way.

A session that is opened while prompts run is often read from the queue before the next step, which
then need not be short: the streams of a burst would make one frame, and the rest in a further step.
"""

from megakernel_tts.backends.protocol import Backend


class Interrupts:
    """Interrupts the backend's steps. `interrupt` and `note_opened` are for any thread.

    They take no lock. The flags are set before the backend is interrupted.

    Attributes:
        opened_wait: Whether sessions that are opened wait for the whole of the next step.
    """

    def __init__(self, backend: Backend) -> None:
        """Starts without an interruption.

        Args:
            backend: Makes the steps.
        """
        self.opened_wait = False
        self._backend = backend
        self._interrupted = self._session_opened = False

    def interrupt(self) -> None:
        """Has the step under way, or the next one, end with a frame."""
        self._interrupted = True
        self._backend.interrupt()

    def note_opened(self) -> None:
        """As `interrupt`, unless `opened_wait`, or the loop reads the streams before the next step.

        Only for a session that waits for a slot: the queue has no others.
        """
        self._session_opened = True
        if not self.opened_wait:
            self._backend.interrupt()

    def clear(self) -> None:
        """Ends the effect of all interruptions, before the loop looks at everything."""
        self._interrupted = self._session_opened = self.opened_wait = False
        self._backend.clear_interrupt()

    def note_reading(self) -> None:
        """Records that the loop reads the queue of streams, before it does."""
        self._session_opened = False

    def drop_opened(self) -> None:
        """Lets the next step be long if only sessions that were read, or wait, would shorten it."""
        if self._ends_step:
            return
        self._backend.clear_interrupt()
        if self._ends_step:  # meanwhile: the backend's flag was cleared
            self._backend.interrupt()

    @property
    def _ends_step(self) -> bool:
        return self._interrupted or (self._session_opened and not self.opened_wait)
