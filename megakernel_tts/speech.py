"""Readers of a session: `Speech` collects all of it, `iterate_chunks` yields its chunks."""

import logging
import os
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.align.word_times import with_ends
from megakernel_tts.align.words import Word
from megakernel_tts.audio import WavWriter
from megakernel_tts.errors import SynthesisError
from megakernel_tts.session import AudioChunk, Finish, FinishReason, Session

# A logger of its own, so that programs that report the end themselves can silence it.
_log = logging.getLogger("megakernel_tts.finish")


@dataclass(frozen=True, eq=False)  # arrays do not compare to a bool
class Speech:
    """The speech of a whole text.

    Attributes:
        pcm: 16-bit samples [samples].
        sample_rate: Sampling rate of `pcm` in Hz.
        codes: Codec codes [frames, groups]; they do not depend on the speed.
        words: The words spoken, with start and end times.
        finish: `eos` if the whole text was spoken, else `length` or `guard`; see `Finish.reason`.
    """

    pcm: NDArray[np.int16]
    sample_rate: int
    codes: NDArray[np.int64]
    words: tuple[Word, ...]
    finish: FinishReason

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.pcm) / self.sample_rate

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a 16-bit mono wav file.

        Args:
            path: A regular file or a new one; links, pipes and devices are refused.

        Raises:
            OSError: The file cannot be written.
        """
        with WavWriter(path, self.sample_rate) as file:
            file.write(self.pcm)


def collect(session: Session, num_groups: int, sample_rate: int) -> Speech:
    """Reads a whole session.

    Args:
        session: Its text is ended, and no event of it was read.
        num_groups: Codes of a frame.
        sample_rate: In Hz.

    Raises:
        SynthesisError: Synthesis failed, or the model was closed.
    """
    with session:
        chunks = [event for event in session if isinstance(event, AudioChunk)]
    finish = outcome(session)
    pcm = np.concatenate([np.zeros(0, np.int16), *(chunk.pcm for chunk in chunks)])
    spoken = [chunk.codes for chunk in chunks if len(chunk.codes)]  # silence has no codes
    codes = np.concatenate([np.zeros((0, num_groups), np.int64), *spoken])
    words = with_ends([word for chunk in chunks for word in chunk.words], pcm, sample_rate)
    return Speech(pcm, sample_rate, codes, words, finish.reason)


def iterate_chunks(session: Session) -> Generator[AudioChunk, None, Finish]:
    """Yields each chunk as soon as it exists; leaving the iteration cancels the session.

    Returns:
        The session's last event.

    Raises:
        SynthesisError: Synthesis failed, or the model was closed.
    """
    with session:
        for event in session:
            if isinstance(event, AudioChunk):
                yield event
    finish = outcome(session)
    log_early_end(finish)
    return finish


def outcome(session: Session) -> Finish:
    """Returns the last event of a session that was read to its end.

    Raises:
        SynthesisError: Synthesis failed, or the model was closed.
    """
    finish = session.finish
    assert finish is not None  # the iteration ends after the finish
    if finish.reason == "error":
        assert finish.error is not None
        raise finish.error
    if finish.reason == "cancelled":
        raise SynthesisError("The speech was cancelled: the model was closed meanwhile.")
    return finish


def log_early_end(finish: Finish) -> None:
    """Logs a warning if speech was cut short: iteration over chunks does not show the finish."""
    if finish.reason != "eos":
        count = f"{finish.frames} frame{'s' * (finish.frames != 1)}"
        _log.warning("The speech was ended after %s: %s.", count, finish.reason)
