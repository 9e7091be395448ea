"""The speech of one audio context: text to a session of the engine, its audio to the pipeline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megakernel_tts import AudioChunk, Session, Word
from pipecat_service.audio import Resampler, Trimmer
from pipecat_service.playhead import OUTPUT_BLOCK_S
from pipecat_service.words import needs_space

SOURCE_RATE = 24_000  # samples per second of every Qwen3-TTS model


@dataclass(frozen=True)
class OutputChunk:
    """Audio and words that are sent together.

    Attributes:
        words: Words that start in the output blocks that the audio completes, timed from the start
            of all of the speech's audio.
        pcm: int16 [samples] at the pipeline's rate.
    """

    words: list[Word]
    pcm: NDArray[np.int16]


class Speech:
    """A session of the engine with the trimmer and the resampler of its audio.

    Attributes:
        session: Session of the engine.
        queued_s: Seconds of output audio that wait behind another context's.
    """

    def __init__(self, session: Session, rate: int) -> None:
        """Starts the speech of a session.

        Args:
            session: Session of the engine, without text.
            rate: Sample rate of the pipeline.
        """
        self.session = session
        self.queued_s = 0.0
        self._rate = rate
        self._trimmer = Trimmer(SOURCE_RATE)
        self._resampler = Resampler(SOURCE_RATE, rate)
        self._pending_words: list[Word] = []  # in an incomplete output block
        self._num_output = 0  # samples
        self._reported_wait_s = 0.0
        self._last_char = " "

    @property
    def has_output(self) -> bool:
        """Whether audio was output."""
        return self._num_output > 0

    def push_text(self, text: str) -> None:
        """Appends text; restores the space before it if another processor stripped it.

        Args:
            text: Not empty.
        """
        if needs_space(self._last_char, text[0]):
            text = " " + text
        self._last_char = text[-1]
        self.session.push_text(text)

    def take_slot_wait_s(self) -> float:
        """Seconds for which the session has waited for a slot since the last call."""
        total_s = self.session.slot_wait_s
        waited_s, self._reported_wait_s = total_s - self._reported_wait_s, total_s
        return waited_s

    def process(self, chunk: AudioChunk) -> OutputChunk:
        """Trims and resamples a chunk of the engine."""
        pcm = self._trimmer.trim(chunk.pcm)
        return self._output(chunk.words, self._resampler.convert(pcm))

    def end(self) -> OutputChunk:
        """Gives the last audio and words, after the last chunk of the engine."""
        return self._output((), self._resampler.end(), last=True)

    def _output(
        self, words: Sequence[Word], pcm: NDArray[np.int16], *, last: bool = False
    ) -> OutputChunk:
        self._num_output += len(pcm)
        self.queued_s += len(pcm) / self._rate
        trimmed_s = self._trimmer.num_dropped / SOURCE_RATE
        self._pending_words += [
            replace(word, start=max(0.0, word.start - trimmed_s)) for word in words
        ]
        block = round(OUTPUT_BLOCK_S * self._rate)
        end = math.inf if last else self._num_output // block * block
        output = [word for word in self._pending_words if round(word.start * self._rate) < end]
        self._pending_words = self._pending_words[len(output) :]
        return OutputChunk(output, pcm)
