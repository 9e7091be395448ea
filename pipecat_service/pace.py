"""How fast a language model writes, and when it pauses."""

import asyncio
from collections.abc import Callable

_FRAME_S = 0.08  # of speech, for which the engine takes one token

_PAUSE_S = 0.15  # of a model that writes faster, or at the end of a clause
_LONG_PAUSE_S = 0.5  # within a clause of a model that writes more slowly


def loop_time_s() -> float:
    """Time of the running event loop in seconds."""
    return asyncio.get_running_loop().time()


class WritingPace:
    """Words per second and pauses of a text, from the times at which its parts arrive.

    The pace is measured from the first part after a pause. Until it is known again, the pace before
    the pause is assumed.
    """

    def __init__(
        self, clock: Callable[[], float] = loop_time_s, speed: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Starts with an unknown pace.

        Args:
            clock: Returns the time in seconds.
            speed: Returns the speed at which the text is spoken.
        """
        self._clock = clock
        self._speed = speed
        self._words_per_s: float | None = None
        self._started_s = 0.0  # arrival of the first part after a pause
        self._latest_s: float | None = None
        self._num_words = 0  # begun since the first part

    def add(self, num_words: int) -> None:
        """Records the arrival of a part of the text.

        Args:
            num_words: Words that begin in it.
        """
        now_s = self._clock()
        if self._latest_s is None or now_s - self._latest_s >= self.pause_s():
            self._started_s, self._num_words = now_s, 0
            num_words -= 1  # the first word took no time that is known
        self._latest_s = now_s
        self._num_words += num_words
        if self._num_words > 0:
            elapsed_s = now_s - self._started_s
            self._words_per_s = self._num_words / elapsed_s if elapsed_s else float("inf")

    @property
    def now_s(self) -> float:
        """Time of the clock in seconds."""
        return self._clock()

    @property
    def words_per_s(self) -> float | None:
        """Words per second; None before two words."""
        return self._words_per_s

    @property
    def slow(self) -> bool:
        """Whether the engine may run out of text within a phrase, as far as is known.

        If every word is one token, speech takes a word per frame. A language model that writes more
        slowly must be ahead when a phrase begins.
        """
        return self._words_per_s is None or self._words_per_s * self.frame_s < 1

    @property
    def frame_s(self) -> float:
        """Seconds of speech for which the engine takes one token."""
        return _FRAME_S / self._speed()

    def pause_s(self, *, clause_ended: bool = False) -> float:
        """Time in seconds without text that is a pause.

        Args:
            clause_ended: Whether the text ends with a clause.
        """
        return _LONG_PAUSE_S if self.slow and not clause_ended else _PAUSE_S

    def until_pause_s(self, *, clause_ended: bool) -> float:
        """Seconds until the text pauses unless more arrives; 0 if it pauses.

        Args:
            clause_ended: Whether the text ends with a clause.
        """
        if self._latest_s is None:
            return 0.0
        pause_s = self.pause_s(clause_ended=clause_ended)
        return max(0.0, self._latest_s + pause_s - self._clock())
