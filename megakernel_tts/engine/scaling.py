"""A segment's audio at another speed, with its words."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.align.words import Word
from megakernel_tts.speed import TimeScaler


class SegmentScaler:
    """Scales the audio and the word times of one segment.

    A word is held back until the audio in which it begins is there.
    """

    def __init__(self, speed: float, sample_rate: int) -> None:
        """Starts before the first sample.

        Args:
            speed: See `TimeScaler`.
            sample_rate: In Hz.
        """
        self._scaler = TimeScaler(speed, sample_rate)
        self._speed = speed
        self._sample_rate = sample_rate
        self._num_out = 0  # samples
        self._words: list[Word] = []  # held back

    def scale(
        self, pcm: NDArray[np.int16], words: Sequence[Word]
    ) -> tuple[NDArray[np.int16], list[Word]]:
        """Scales the next samples [samples] and the words that begin in them.

        Returns:
            The samples that are ready, [samples], and the words that begin in them.
        """
        scaled = self._scaler.push(pcm)
        self._num_out += len(scaled)
        self._words += [replace(word, start=word.start / self._speed) for word in words]
        end_s = self._num_out / self._sample_rate
        ready = [word for word in self._words if word.start < end_s]
        self._words = self._words[len(ready) :]
        return scaled, ready

    def end(self) -> tuple[NDArray[np.int16], list[Word]]:
        """Returns the samples and words that were held back."""
        return self._scaler.end(), self._words
