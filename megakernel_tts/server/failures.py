"""The log of failures during synthesis: why streams ended with an error."""

import logging
import time

from megakernel_tts import MegakernelTTSError, SynthesisError
from megakernel_tts.server.errors import EngineProcessError

_log = logging.getLogger("megakernel_tts.server")

_MAX_TEXTS = 64  # that are remembered


class FailureLog:
    """Logs each failure of an engine once, although it may end several streams.

    Streams of one failure have the same error text. Some are read to their end much later than
    others, so a stream belongs to a failure that was logged after it was opened.
    """

    def __init__(self) -> None:
        """Starts without a failure."""
        self._logged_s: dict[str, float] = {}  # by error text: when it was logged last

    def add(self, error: SynthesisError, opened_s: float) -> None:
        """Logs an error, unless an engine process or an earlier stream has logged its failure.

        Args:
            error: The error of a stream.
            opened_s: When the stream was opened, of the monotonic clock.
        """
        text = str(error)
        if isinstance(error, EngineProcessError) or opened_s <= self._logged_s.get(text, -1.0):
            return
        self._logged_s.pop(text, None)
        if len(self._logged_s) == _MAX_TEXTS:
            self._logged_s.pop(next(iter(self._logged_s)))
        self._logged_s[text] = time.monotonic()
        # Errors of this package say what to do; others are mistakes, of which the place is needed.
        cause = error.__cause__ or error
        trace = None if isinstance(cause, MegakernelTTSError) else cause
        _log.error("synthesis has failed", exc_info=trace, extra={"fields": {"error": text}})
