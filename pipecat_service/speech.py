"""The speech of one audio context: text to a session, its audio to the pipeline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megakernel_tts import Word
from pipecat_service.audio import Resampler, Trimmer
from pipecat_service.pace import loop_time_s
from pipecat_service.playhead import OUTPUT_BLOCK_S
from pipecat_service.protocol import SOURCE_RATE, SpeechChunk, SpeechSession
from pipecat_service.words import needs_space

_SETTLE_S = 0.1  # after a push; an engine takes less unless it is slower than real time


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
    """A session with the trimmer and the resampler of its audio.

    Attributes:
        session: The session.
        unfinished: Whether the text so far is not spoken to its end unless more follows.
    """

    def __init__(self, session: SpeechSession, rate: int) -> None:
        """Starts the speech of a session.

        Args:
            session: The session, without text.
            rate: Sample rate of the pipeline.
        """
        self.session = session
        self.unfinished = False
        self._pushed_at_s = 0.0
        self._rate = rate
        self._segment = 0  # of the text, to which the latest audio belongs
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
        """Appends words and the space after them, without which the last one might continue.

        Args:
            text: Not empty.
        """
        if self._last_char.isspace():
            text = text.lstrip(" ")
        elif needs_space(self._last_char, text[0]):
            text = " " + text
        if needs_space(text[-1], "a"):
            text += " "
        self._last_char = text[-1]
        self.session.push_text(text)
        self.unfinished = True
        self._pushed_at_s = loop_time_s()

    @property
    def until_settled_s(self) -> float:
        """Seconds until the engine has made all the audio that the text so far allows."""
        return max(0.0, self._pushed_at_s + _SETTLE_S - loop_time_s())

    def flush(self, *, within_phrase: bool) -> None:
        """Has the text so far spoken to its end.

        Args:
            within_phrase: Whether the text so far ends within a phrase. The silence to the rest of
                the phrase, which is a segment of its own, is limited to that between words.
        """
        self.unfinished = False
        self._last_char = " "  # the text that follows is a segment of its own
        if within_phrase:
            self._trimmer.expect_joint()
        self.session.flush()

    def end_text(self) -> None:
        """Ends the text; the speech continues to its end."""
        self.unfinished = False
        self.session.end()

    def take_slot_wait_s(self) -> float:
        """Seconds for which the session has waited for a slot since the last call."""
        total_s = self.session.slot_wait_s
        waited_s, self._reported_wait_s = total_s - self._reported_wait_s, total_s
        return waited_s

    def process(self, chunk: SpeechChunk) -> OutputChunk:
        """Trims and resamples a chunk; the silence of a break is not trimmed."""
        if chunk.segment != self._segment:
            self._segment = chunk.segment
            self._trimmer.begin_segment()
        pcm = self._trimmer.keep(chunk.pcm) if chunk.is_break else self._trimmer.trim(chunk.pcm)
        return self._output(chunk.words, self._resampler.convert(pcm))

    def end(self) -> OutputChunk:
        """Gives the last audio and words, after the last chunk.

        Words of speech that had no sound are dropped.
        """
        held = self._resampler.convert(self._trimmer.end())
        return self._output((), np.concatenate([held, self._resampler.end()]), last=True)

    def _output(
        self, words: Sequence[Word], pcm: NDArray[np.int16], *, last: bool = False
    ) -> OutputChunk:
        self._num_output += len(pcm)
        self._pending_words += words
        block = round(OUTPUT_BLOCK_S * self._rate)
        end = math.inf if last and self._num_output else self._num_output // block * block
        timed = [replace(word, start=self._output_s(word.start)) for word in self._pending_words]
        output = [word for word in timed if round(word.start * self._rate) < end]
        self._pending_words = self._pending_words[len(output) :]
        return OutputChunk(output, pcm)

    def _output_s(self, start_s: float) -> float:
        """Seconds of output audio before an instant of the engine's."""
        return self._trimmer.output_position(round(start_s * SOURCE_RATE)) / SOURCE_RATE
