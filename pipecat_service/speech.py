"""One audio context's speech: its text on the way in, its audio on the way out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megakernel_tts import AudioChunk, Session, Word
from pipecat_service.audio import Resampler, Trimmer
from pipecat_service.words import needs_space

SOURCE_RATE = 24_000  # samples a second, of every Qwen3-TTS model


@dataclass(frozen=True)
class Portion:
    """What leaves together.

    Attributes:
        words: Those that begin in the audio, timed from where all of the speech's audio begins.
        pcm: [samples] at the pipeline's rate.
    """

    words: list[Word]
    pcm: NDArray[np.int16]


class Speech:
    """A session of the engine, and what its audio passes through.

    Attributes:
        session: Of the engine.
        seconds: Of audio that have left.
        waiting: Seconds of it that wait behind another context's.
    """

    def __init__(self, session: Session, rate: int) -> None:
        self.session = session
        self._rate = rate
        self.seconds = 0.0
        self.waiting = 0.0
        self._trimmer = Trimmer(SOURCE_RATE)
        self._resampler = Resampler(SOURCE_RATE, rate)
        self._last = " "  # character of the text so far

    def say(self, text: str) -> None:
        """Adds text. Pieces that other processors cut off with their spaces get them back."""
        if needs_space(self._last, text[0]):
            text = " " + text
        self._last = text[-1]
        self.session.push_text(text)

    def hear(self, chunk: AudioChunk) -> Portion:
        """Takes a chunk from the engine."""
        pcm = self._trimmer.trim(chunk.pcm)
        return self._portion(chunk.words, self._resampler.convert(pcm))

    def end(self) -> Portion:
        """Gives what is left once the engine has finished."""
        return self._portion((), self._resampler.end())

    def _portion(self, words: Sequence[Word], pcm: NDArray[np.int16]) -> Portion:
        seconds = len(pcm) / self._rate
        self.seconds += seconds
        self.waiting += seconds
        trimmed = self._trimmer.dropped / SOURCE_RATE
        heard = [replace(word, start=max(0.0, word.start - trimmed)) for word in words]
        return Portion(heard, pcm)
