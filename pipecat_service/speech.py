"""One audio context's speech: its text on the way in, its audio on the way out."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megakernel_tts import AudioChunk, Session
from pipecat_service.audio import Resampler, Trimmer
from pipecat_service.timing import WordTime, WordTimes
from pipecat_service.words import needs_space

SOURCE_RATE = 24_000  # samples a second, of every Qwen3-TTS model


@dataclass(frozen=True)
class Portion:
    """What leaves together.

    Attributes:
        words: Those that begin in the audio.
        pcm: [samples] at the pipeline's rate.
    """

    words: list[WordTime]
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
        self._times = WordTimes(SOURCE_RATE)
        self._trimmer = Trimmer(SOURCE_RATE)
        self._resampler = Resampler(SOURCE_RATE, rate)
        self._last = " "  # character of the text so far

    def say(self, text: str) -> None:
        """Adds text. Pieces that other processors cut off with their spaces get them back."""
        if needs_space(self._last, text[0]):
            text = " " + text
        self._last = text[-1]
        self._times.write(text)
        self.session.push_text(text)

    def hear(self, chunk: AudioChunk) -> Portion:
        """Takes a chunk from the engine."""
        pcm = self._trimmer.trim(chunk.pcm)
        return self._portion(self._times.hear(pcm), self._resampler.convert(pcm))

    def end(self) -> Portion:
        """Gives what is left once the engine has finished."""
        return self._portion(self._times.end(), self._resampler.end())

    def _portion(self, words: list[WordTime], pcm: NDArray[np.int16]) -> Portion:
        seconds = len(pcm) / self._rate
        self.seconds += seconds
        self.waiting += seconds
        return Portion(words, pcm)
