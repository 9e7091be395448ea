"""Estimated word times of one segment, for models without calibrated alignment heads.

The duration of a word is estimated from its letters. Pauses in the audio mark ends of clauses, at
which the estimate is corrected. The error of a word between two pauses is a fraction of the time
between them.
"""

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.align.intervals import INTERVAL_S
from megakernel_tts.align.words import Transcript, Word, WrittenWord, split_words
from megakernel_tts.audio import AUDIBLE
from megakernel_tts.text.markup import Replacement

# Seconds at an ordinary pace.
_WORD = 0.10  # every word, in addition to its letters and digits
_LETTER = 0.045
_DIGIT = 0.30  # is spoken as a word
_UNSPACED = 0.20  # a character of a script without spaces

_MAX_KNOWN_WORDS, _MAX_KNOWN_LENGTH = 4096, 32  # of the cache of words, in characters

_PAUSE_INTERVALS = 8  # silent intervals that end a clause
# A pause corrects the estimate to a clause within this distance: a share of the time since the last
# correction, at least the minimum in seconds.
_MAX_CORRECTION_SHARE = 0.35
_MIN_CORRECTION_RANGE = 0.3


def spoken_seconds(text: str) -> float:
    """Estimates the duration of a text at an ordinary pace, without pauses, in seconds."""
    return _spoken_seconds(split_words(text))


def _spoken_seconds(words: Sequence[WrittenWord]) -> float:
    return sum(
        _UNSPACED if word.unspaced else _WORD + _letters(word.text) for word in words if word.spoken
    )


def _pace(word: str) -> tuple[float, bool]:
    """Seconds of what is spoken for a word, and whether a clause ends with it."""
    spoken = split_words(word)
    return _spoken_seconds(spoken), spoken[-1].ends_clause


@lru_cache(_MAX_KNOWN_WORDS)  # most words of a text were in earlier ones
def _known_pace(word: str) -> tuple[float, bool]:
    return _pace(word)


def _letters(word: str) -> float:
    num_digits = sum(map(str.isdigit, word))
    return _DIGIT * num_digits + _LETTER * (sum(map(str.isalnum, word)) - num_digits)


class EstimatedWordTimer:
    """A `WordTimer` that estimates times from text and pauses. It ignores attention scores.

    Words start where an interval of 20 ms starts.
    """

    def __init__(self, transcript: Transcript) -> None:
        """Starts before the first frame of a text."""
        self._transcript = transcript
        self._num_intervals = 0
        self._num_silent = 0  # intervals since the last audible one
        self._num_queued = 0  # words of the text that were added to `_pending`
        self._pending: deque[tuple[str, float]] = deque()  # words and their starts in text time
        # "Text time" is the time in seconds at the ordinary pace, without pauses.
        self._text_end = 0.0  # of the words that were queued
        self._clause_starts: list[float] = []  # after the last correction
        self._text_time = 0.0  # of the speech so far
        self._corrected_at = 0.0  # `_text_time` at the last correction

    def update_text(
        self, ids: Sequence[int], num_whole: int, replacements: Sequence[Replacement] = ()
    ) -> None:
        """See `WordTimer.update_text`."""
        self._transcript.update(ids, num_whole, replacements)

    def _queue_words(self, before_s: float = math.inf) -> None:
        """Queues the words that begin before a text time.

        The others wait until they are needed: those of a whole text would delay its first chunk. A
        word gets the punctuation that has arrived by then.
        """
        while self._text_end < before_s and self._num_queued < self._transcript.num_complete:
            spoken = self._transcript.spoken(self._num_queued)
            is_short = len(spoken) <= _MAX_KNOWN_LENGTH
            seconds, ends_clause = _known_pace(spoken) if is_short else _pace(spoken)
            self._pending.append((self._transcript[self._num_queued], self._text_end))
            self._text_end += seconds
            if ends_clause:
                self._clause_starts.append(self._text_end)
            self._num_queued += 1

    def add_scores(self, scores: NDArray[np.float32]) -> None:
        """Ignores the scores; see `WordTimer.add_scores`."""

    def add_audio(self, peaks: NDArray[np.uint16], *, last: bool) -> list[Word]:
        """See `WordTimer.add_audio`."""
        words: list[Word] = []
        for sounds in (peaks.ravel() >= AUDIBLE).tolist():
            if sounds:
                if self._num_silent:
                    self._end_pause()
                if self._text_end < self._text_time + INTERVAL_S:
                    self._queue_words(self._text_time + INTERVAL_S)
                    # Speech that is ahead of the text continues with the next text that arrives.
                    self._text_time = min(self._text_time, self._text_end)
                if self._pending and self._pending[0][1] <= self._text_time + INTERVAL_S / 2:
                    words += self._reached_words()
                self._text_time += INTERVAL_S
            else:
                self._num_silent += self._text_time > 0  # silence before the speech is no pause
            self._num_intervals += 1
        if last:
            self._queue_words()
            words += [self._word_now(text) for text, _ in self._pending]
            self._pending.clear()
        return words

    @property
    def num_pending(self) -> int:
        """See `WordTimer.num_pending`."""
        return len(self._transcript) - self._num_queued + len(self._pending)

    def frames_since_end(self, frame: int) -> int:
        """Returns 0: the estimate is not reliable enough to detect the end of the text."""
        return 0

    def _end_pause(self) -> None:
        """At the first sound after a pause, corrects the estimate."""
        if self._num_silent >= _PAUSE_INTERVALS:
            self._correct()
        self._num_silent = 0

    def _correct(self) -> None:
        """Sets the text time to the nearest clause start within the allowed distance."""
        elapsed = self._text_time - self._corrected_at
        max_distance = max(_MIN_CORRECTION_RANGE, _MAX_CORRECTION_SHARE * elapsed)
        self._queue_words(self._text_time + max_distance)
        nearest = min(
            self._clause_starts, key=lambda start: abs(start - self._text_time), default=None
        )
        if nearest is not None and abs(nearest - self._text_time) <= max_distance:
            self._text_time = self._corrected_at = nearest
            self._clause_starts = [start for start in self._clause_starts if start > nearest]

    def _reached_words(self) -> list[Word]:
        words: list[Word] = []
        while self._pending and self._pending[0][1] <= self._text_time + INTERVAL_S / 2:
            words.append(self._word_now(self._pending.popleft()[0]))
        return words

    def _word_now(self, text: str) -> Word:
        return Word(text, round(self._num_intervals * INTERVAL_S, 3), None, True)
