"""A session read to its end: the whole of it, or chunk by chunk."""

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

# Of its own, for programs that tell of the end in other words.
_log = logging.getLogger("megakernel_tts.finish")


@dataclass(frozen=True, eq=False)  # arrays have no one truth to compare by
class Speech:
    """Something said.

    Attributes:
        pcm: [samples], 16-bit.
        sample_rate: Samples a second.
        codes: [frames, groups].
        words: Those that were said, with their ends.
        finish: How it ended: `eos` (all was said), `length` or `guard`.
    """

    pcm: NDArray[np.int16]
    sample_rate: int
    codes: NDArray[np.int64]
    words: tuple[Word, ...]
    finish: FinishReason

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return len(self.pcm) / self.sample_rate

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a wav file."""
        with WavWriter(path, self.sample_rate) as file:
            file.write(self.pcm)


def collect(session: Session, groups: int, sample_rate: int) -> Speech:
    """Reads a session whose text is ended.

    Args:
        session: Of which nothing was read.
        groups: Codes of a frame.
        sample_rate: Samples a second.

    Raises:
        SynthesisError: It failed, or the model was closed meanwhile.
    """
    with session:
        chunks = [event for event in session if isinstance(event, AudioChunk)]
    finish = outcome(session)
    pcm = np.concatenate([np.zeros(0, np.int16), *(c.pcm for c in chunks)])
    codes = np.concatenate([np.zeros((0, groups), np.int64), *(c.codes for c in chunks)])
    words = with_ends([word for c in chunks for word in c.words], pcm, sample_rate)
    return Speech(pcm, sample_rate, codes, words, finish.reason)


def iterate_chunks(session: Session) -> Generator[AudioChunk, None, Finish]:
    """Each chunk as soon as it exists; leaving the iteration stops the speech.

    Returns:
        How it ended.

    Raises:
        SynthesisError: It failed, or the model was closed meanwhile.
    """
    with session:
        for event in session:
            if isinstance(event, AudioChunk):
                yield event
    finish = outcome(session)
    log_early_end(finish)
    return finish


def outcome(session: Session) -> Finish:
    """How a session ended that was read to its end.

    Raises:
        SynthesisError: It failed, or the model was closed meanwhile.
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
    """Tells those who iterate over chunks, and so see no finish, that speech was cut short."""
    if finish.reason != "eos":
        count = f"{finish.frames} frame{'s' * (finish.frames != 1)}"
        _log.warning("The speech was ended after %s: %s.", count, finish.reason)
