"""How fast a language model writes, and when it pauses."""

import asyncio
from collections import deque
from collections.abc import Callable

from megakernel_tts import LivePolicy

_CODEC_FRAME_S = 0.08  # of speech, for which the engine takes one token

# Time without text that is a pause, unless the text arrives in parts at longer intervals: then 1.5
# times the longest of the recent ones. An interval of the upper limit is no sign of the pace.
_LIVE = LivePolicy()
_MIN_PAUSE_IN_GAP_S = 0.1  # while speech lacks audio, which more text would no longer prevent
_PAUSE_INTERVALS = 1.5
_TOLERANCE_S = 0.005  # within which the next part arrives in time
_RECENT_S = 2.0
_ASSUMED_INTERVAL_S = 0.25  # before two parts have arrived


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
        self._intervals: deque[tuple[float, float]] = deque()  # ends and durations of the recent
        self._interval_s = _ASSUMED_INTERVAL_S  # the longest of them

    def add(self, num_words: int) -> None:
        """Records the arrival of a part of the text.

        Args:
            num_words: Words that begin in it.
        """
        now_s = self._clock()
        interval_s = float("inf") if self._latest_s is None else now_s - self._latest_s
        if interval_s >= self.pause_s():
            self._started_s, self._num_words = now_s, 0
            num_words -= 1  # the first word took no time that is known
        if interval_s < _LIVE.max_pause_s:
            self._add_interval(now_s, interval_s)
        self._latest_s = now_s
        self._num_words += num_words
        if self._num_words > 0:
            elapsed_s = now_s - self._started_s
            self._words_per_s = self._num_words / elapsed_s if elapsed_s else float("inf")

    def _add_interval(self, now_s: float, interval_s: float) -> None:
        self._intervals.append((now_s, interval_s))
        while self._intervals[0][0] < now_s - _RECENT_S:
            self._intervals.popleft()
        self._interval_s = max(duration_s for _, duration_s in self._intervals)

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

        If every word is one token, speech takes a word per codec frame. A language model that
        writes more slowly must be ahead when a phrase begins.
        """
        return self._words_per_s is None or self._words_per_s * self.codec_frame_s < 1

    @property
    def codec_frame_s(self) -> float:
        """Seconds of speech for which the engine takes one token."""
        return _CODEC_FRAME_S / self._speed()

    def pause_s(self, *, clause_ended: bool = False, in_gap: bool = False) -> float:
        """Time in seconds without text that is a pause.

        Args:
            clause_ended: Whether the text ends with a clause, after which speech may pause as well.
            in_gap: Whether the speech of the text so far lacks audio.
        """
        min_s = _MIN_PAUSE_IN_GAP_S if in_gap else _LIVE.min_pause_s
        if clause_ended or self._interval_s + _TOLERANCE_S < min_s:
            return min_s
        return min(_PAUSE_INTERVALS * self._interval_s, _LIVE.max_pause_s)

    def until_pause_s(self, *, clause_ended: bool, in_gap: bool = False) -> float:
        """Seconds until the text pauses unless more arrives; 0 if it pauses.

        Args:
            clause_ended: See `pause_s`.
            in_gap: See `pause_s`.
        """
        if self._latest_s is None:
            return 0.0
        pause_s = self.pause_s(clause_ended=clause_ended, in_gap=in_gap)
        return max(0.0, self._latest_s + pause_s - self._clock())
