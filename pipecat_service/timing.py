"""When each word is spoken: an estimate, until an aligner can tell.

The model reports no word times. A word's length tells about how long it takes, and the pauses that
are heard in the audio tell where clauses end: at each of them the estimate is set right. Words
between two pauses are off by a fraction of the time between them.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipecat_service.audio import AUDIBLE
from pipecat_service.words import Word, split_words

STEP = 0.02  # seconds: audio is looked at in steps, and words begin at one

_WORD = 0.10  # seconds of every word
_LETTER = 0.045
_DIGIT = 0.30  # a digit is a word
_UNSPACED = 0.20  # a character that is a word

_PAUSE = 8  # quiet steps after which a clause is taken to have ended
_NEAR = 0.35  # how far from where it was estimated, as a share of the time since the last one
_NEAR_LEAST = 0.3  # seconds


@dataclass(frozen=True)
class WordTime:
    """A word and when it begins.

    Attributes:
        text: The word.
        seconds: From the start of the audio.
        unspaced: Whether its script puts no spaces between words.
        estimated: Whether the time is an estimate; it is, until the engine aligns words.
    """

    text: str
    seconds: float
    unspaced: bool = False
    estimated: bool = True


def spoken_seconds(word: str) -> float:
    """How long a word takes at an ordinary pace."""
    if split_words(word)[0].unspaced:
        return _UNSPACED
    return _WORD + sum(_DIGIT if c.isdigit() else _LETTER for c in word if c.isalnum())


@dataclass(frozen=True)
class _Due:
    """A word that has not been reached.

    Attributes:
        word: The word.
        start: When it begins if the speech goes on at an ordinary pace without pauses.
    """

    word: Word
    start: float


class WordTimes:
    """Follows one stream: text in, audio in, words with their times out.

    Words come out before the audio in which they begin has been played, if the audio is given to
    `hear` before it is sent to be played.
    """

    def __init__(self, rate: int) -> None:
        self._step = int(STEP * rate)  # samples
        self._rest = np.zeros(0, np.int16)  # less than a step
        self._due: deque[_Due] = deque()
        self._known = 0.0  # ordinary seconds of the text so far
        self._clauses: list[float] = []  # where they begin, in ordinary seconds, since the anchor
        self._spoken = 0.0  # ordinary seconds of the text spoken by now
        self._anchor = 0.0  # where it was at the last pause
        self._steps = 0  # heard
        self._quiet = 0  # steps since the last sound

    def write(self, text: str) -> None:
        """Takes more text; words must not be cut in two."""
        for word in split_words(text):
            self._due.append(_Due(word, self._known))
            self._known += spoken_seconds(word.text)
            if word.ends_clause:
                self._clauses.append(self._known)

    def hear(self, pcm: NDArray[np.int16]) -> list[WordTime]:
        """Takes the next samples; gives the words that begin in them."""
        samples = np.concatenate([self._rest, pcm])
        steps = len(samples) // self._step
        self._rest = samples[steps * self._step :]
        words: list[WordTime] = []
        for part in samples[: steps * self._step].reshape(steps, self._step):
            audible = int(np.abs(part.astype(np.int32)).max()) >= AUDIBLE
            self._listen(audible)
            words += self._reached() if audible else []
            self._steps += 1
            self._spoken += STEP if audible else 0.0
        return words

    def end(self) -> list[WordTime]:
        """Gives the words that the estimate had still to come when the speech was over."""
        rest, self._due = self._due, deque()
        return [self._at_now(due.word) for due in rest]

    def _listen(self, audible: bool) -> None:
        """After a pause, goes on at the clause that is nearest to the estimate."""
        if not audible:
            self._quiet += 1
            return
        if self._quiet >= _PAUSE:
            self._set_right()
        self._quiet = 0
        # Speech that has overtaken its text goes on with whatever comes next.
        self._spoken = min(self._spoken, self._known)

    def _set_right(self) -> None:
        near = max(_NEAR_LEAST, _NEAR * (self._spoken - self._anchor))
        nearest = min(self._clauses, key=lambda start: abs(start - self._spoken), default=None)
        if nearest is not None and abs(nearest - self._spoken) <= near:
            self._spoken = self._anchor = nearest
            self._clauses = [start for start in self._clauses if start > nearest]

    def _reached(self) -> Iterator[WordTime]:
        while self._due and self._due[0].start <= self._spoken + STEP / 2:
            yield self._at_now(self._due.popleft().word)

    def _at_now(self, word: Word) -> WordTime:
        return WordTime(word.text, round(self._steps * STEP, 3), word.unspaced)
