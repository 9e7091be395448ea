"""Word times of one segment of text, from the talker's attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.align.attention import unit_log_attention
from megakernel_tts.align.intervals import INTERVAL_S
from megakernel_tts.align.online import OnlineSearch
from megakernel_tts.align.words import Transcript, Word
from megakernel_tts.audio import AUDIBLE, audible
from megakernel_tts.text.markup import Replacement


class WordTimer(Protocol):
    """Times the words of one segment while text, attention scores and audio arrive.

    Times are in seconds from the first sample of the segment.
    """

    def update_text(
        self, ids: Sequence[int], num_whole: int, replacements: Sequence[Replacement] = ()
    ) -> None:
        """Adds the new tokens of the segment's text; see `Transcript.update`."""
        ...

    def add_scores(self, scores: NDArray[np.float32]) -> None:
        """Adds the attention scores of the next frames.

        Args:
            scores: [frames, heads, positions], before the softmax; see `Frames.scores`.
        """
        ...

    def add_audio(self, peaks: NDArray[np.uint16], *, last: bool) -> list[Word]:
        """Adds the audio of the next frames.

        Args:
            peaks: [frames, intervals], by `interval_peaks` of intervals.py.
            last: Whether the segment ends after these frames, with all of its text spoken.

        Returns:
            The words that begin in these frames; with `last` also all remaining words.
        """
        ...

    @property
    def num_pending(self) -> int:
        """The number of words that have not been returned."""
        ...

    def frames_since_end(self, frame: int) -> int:
        """The number of frames between the text's last unit and a frame of the segment.

        0 if the speech has not reached the end of the text.
        """
        ...


class AlignedWordTimer:
    """A `WordTimer` that searches the path through the text that the alignment heads attended."""

    def __init__(self, transcript: Transcript, text_start: int, floor: float) -> None:
        """Starts before the first frame.

        Args:
            transcript: The text.
            text_start: Position of the text's first token in the talker's sequence.
            floor: Minimum attention; see `unit_log_attention`.
        """
        self._transcript = transcript
        self._text_start = text_start
        self._floor = floor
        self._search = OnlineSearch()
        self._unit_starts = np.zeros(0, np.int64)  # the first token of each unit
        self._num_scored = 0  # frames with scores
        self._end_reached_at: int | None = None  # `_num_scored` at the end of the text
        self._seconds = 0.0  # of audio
        self._starts: list[float] = []  # of the words that have begun
        self._num_returned = 0  # words

    def update_text(
        self, ids: Sequence[int], num_whole: int, replacements: Sequence[Replacement] = ()
    ) -> None:
        """See `WordTimer.update_text`."""
        self._transcript.update(ids, num_whole, replacements)

    def add_scores(self, scores: NDArray[np.float32]) -> None:
        """See `WordTimer.add_scores`."""
        transcript, search = self._transcript, self._search
        if new_units := transcript.unit_silent[search.num_units :]:
            search.append_units(new_units)
            self._unit_starts = np.array(transcript.unit_starts)
        text_end = self._text_start + transcript.num_tokens
        text_scores = scores[:, :, self._text_start : text_end]
        # A text may have more tokens than the slot has positions.
        if (num_missing := transcript.num_tokens - text_scores.shape[2]) > 0:
            padding = (0, 0), (0, 0), (0, num_missing)
            text_scores = np.pad(text_scores, padding, constant_values=np.nan)
        search.push_frames(unit_log_attention(text_scores, self._unit_starts, self._floor))
        self._num_scored += len(scores)
        if not search.at_end:
            self._end_reached_at = None
        elif self._end_reached_at is None:
            self._end_reached_at = self._num_scored

    def add_audio(self, peaks: NDArray[np.uint16], *, last: bool) -> list[Word]:
        """See `WordTimer.add_audio`."""
        transcript, path = self._transcript, self._search.path(ended=last)[: len(peaks)]
        self._search.drop_frames(len(peaks))
        has_sound = (np.max(peaks, axis=1, initial=0) >= AUDIBLE).tolist()
        for unit, sounds in zip(path, has_sound, strict=True):
            word, silent = transcript.unit_words[max(unit, 0)], transcript.unit_silent[max(unit, 0)]
            # A word whose unit has no audible frame yet has not begun. No word begins twice.
            if (num_begun := word + (silent or sounds)) > len(self._starts):
                self._begin_words(num_begun)
            self._seconds += peaks.shape[1] * INTERVAL_S
        if last:
            self._begin_words(len(transcript))
        return self._complete_words()

    def _begin_words(self, num_begun: int) -> None:
        """Sets the start of all words below `num_begun` that have none to the current time."""
        self._starts += [round(self._seconds, 3)] * (num_begun - len(self._starts))

    def _complete_words(self) -> list[Word]:
        """The words that have begun, whose text is complete, and that were not returned."""
        transcript, first = self._transcript, self._num_returned
        self._num_returned = min(len(self._starts), transcript.num_complete)
        starts = enumerate(self._starts[first : self._num_returned], first)
        return [Word(transcript[i], start, None, False) for i, start in starts]

    @property
    def num_pending(self) -> int:
        """See `WordTimer.num_pending`."""
        return len(self._transcript) - self._num_returned

    def frames_since_end(self, frame: int) -> int:
        """See `WordTimer.frames_since_end`."""
        return 0 if self._end_reached_at is None else max(0, frame - self._end_reached_at)


def with_ends(words: Sequence[Word], pcm: NDArray[np.int16], sample_rate: int) -> tuple[Word, ...]:
    """Adds ends to the words of a complete speech: the last sound before the next word begins.

    Args:
        words: In order.
        pcm: [samples], the complete speech.
        sample_rate: In Hz.
    """
    with_end: list[Word] = []
    boundaries = [round(word.start * sample_rate) for word in words] + [len(pcm)]
    for word, start, stop in zip(words, boundaries, boundaries[1:], strict=False):
        sounds = np.flatnonzero(audible(pcm[start:stop]))
        end = start + int(sounds[-1]) + 1 if len(sounds) else stop
        with_end.append(replace(word, end=round(end / sample_rate, 3)))
    return tuple(with_end)
