"""When the words of one piece of text are spoken: an estimate, where no heads were calibrated.

A word's length tells about how long it takes, and the pauses that are heard in the audio tell where
clauses end: at each of them the estimate is set right. Words between two pauses are off by a
fraction of the time between them.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.align.words import Transcript, Word, split_words
from megakernel_tts.audio import audible

STEP = 0.02  # seconds: audio is looked at in steps, and words begin at one

_WORD = 0.10  # seconds of every word
_LETTER = 0.045
_DIGIT = 0.30  # a digit is a word
_UNSPACED = 0.20  # a character that is a word

_PAUSE = 8  # quiet steps after which a clause is taken to have ended
_NEAR = 0.35  # how far from where it was estimated, as a share of the time since the last one
_NEAR_LEAST = 0.3  # seconds


def spoken_seconds(text: str) -> float:
    """How long words take at an ordinary pace."""
    words = [word for word in split_words(text) if word.spoken]
    return sum(_UNSPACED if word.unspaced else _WORD + _letters(word.text) for word in words)


def _letters(word: str) -> float:
    return sum(_DIGIT if c.isdigit() else _LETTER for c in word if c.isalnum())


class EstimatedWordTimer:
    """`WordTimer` by an estimate; it looks at no attention."""

    def __init__(self, transcript: Transcript, rate: int) -> None:
        """Starts with nothing heard.

        Args:
            transcript: The text.
            rate: Samples a second.
        """
        self._transcript = transcript
        self._step = int(STEP * rate)  # samples
        self._rest = np.zeros(0, np.int16)  # less than a step
        self._due: deque[tuple[str, float]] = deque()  # words, when they begin without pauses
        self._taken = 0  # words of the text
        self._known = 0.0  # ordinary seconds of the text so far
        self._clauses: list[float] = []  # where they begin, in ordinary seconds, since the anchor
        self._spoken = 0.0  # ordinary seconds of the text spoken by now
        self._anchor = 0.0  # where it was at the last pause
        self._steps = 0  # heard
        self._quiet = 0  # steps since the last sound

    def update_text(self, ids: Sequence[int], num_whole: int) -> None:
        """See `WordTimer.update_text`."""
        self._transcript.update(ids, num_whole)
        for i in range(self._taken, self._transcript.num_complete):
            text = self._transcript[i]
            self._due.append((text, self._known))
            self._known += spoken_seconds(text)
            if split_words(text)[-1].ends_clause:
                self._clauses.append(self._known)
        self._taken = self._transcript.num_complete

    def add_scores(self, scores: NDArray[np.float32]) -> None:
        """See `WordTimer.add_scores`."""

    def add_audio(self, samples: NDArray[np.int16], *, last: bool) -> list[Word]:
        """See `WordTimer.add_audio`."""
        samples = np.concatenate([self._rest, samples.ravel()])
        steps = len(samples) // self._step
        self._rest = samples[steps * self._step :]
        parts = samples[: steps * self._step].reshape(steps, self._step)
        words: list[Word] = []
        for sounds in np.any(audible(parts), axis=1).tolist():
            self._listen(sounds)
            words += self._reached() if sounds else []
            self._steps += 1
            self._spoken += STEP if sounds else 0.0
        if last:
            words += [self._at_now(text) for text, _ in self._due]
            self._due.clear()
        return words

    @property
    def num_pending(self) -> int:
        """See `WordTimer.num_pending`."""
        return len(self._transcript) - self._taken + len(self._due)

    def frames_since_end(self, frame: int) -> int:
        """An estimate cannot tell: none."""
        return 0

    def _listen(self, sounds: bool) -> None:
        """After a pause, goes on at the clause that is nearest to the estimate."""
        if not sounds:
            self._quiet += self._spoken > 0  # the silence before speech is no pause
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

    def _reached(self) -> Iterator[Word]:
        while self._due and self._due[0][1] <= self._spoken + STEP / 2:
            yield self._at_now(self._due.popleft()[0])

    def _at_now(self, text: str) -> Word:
        return Word(text, round(self._steps * STEP, 3), None, True)
