"""When the words of one piece of text are spoken: by the talker's attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.align.attention import unit_log_attention
from megakernel_tts.align.online import OnlineSearch
from megakernel_tts.align.words import Transcript, Word
from megakernel_tts.audio import audible


class WordTimer(Protocol):
    """Follows one piece: text and scores as they become known, samples as they leave.

    Times are seconds from the piece's first sample.
    """

    def update_text(self, ids: Sequence[int], num_whole: int) -> None:
        """Takes the text as far as it is written, as `Transcript.write` does."""
        ...

    def add_scores(self, scores: NDArray[np.float32]) -> None:
        """Takes the attention of the next frames that were made [frames, heads, positions]."""
        ...

    def add_audio(self, samples: NDArray[np.int16], *, last: bool) -> list[Word]:
        """Takes the next frames that leave.

        Args:
            samples: [frames, samples a frame].
            last: Whether they end the speech, and all of the text was said.

        Returns:
            The words that begin in them; with `last` all that are left, too.
        """
        ...

    @property
    def num_pending(self) -> int:
        """How many words of the text have not begun."""
        ...

    def frames_since_end(self, frame: int) -> int:
        """For how many frames before this one the end of the text has been reached."""
        ...


class AlignedWordTimer:
    """`WordTimer` by a search for the path through the text that the heads looked along."""

    def __init__(self, transcript: Transcript, rate: int, text_start: int, floor: float) -> None:
        """Starts with nothing made.

        Args:
            transcript: The text.
            rate: Samples a second.
            text_start: The position of the text's first token.
            floor: The least attention that counts; see `columns`.
        """
        self._transcript = transcript
        self._rate = rate
        self._text_at = text_start
        self._floor = floor
        self._search = OnlineSearch()
        self._firsts = np.zeros(0, np.int64)  # each unit's first token
        self._made = 0
        self._arrived: int | None = None  # frames made when the text's end was reached
        self._now = 0.0  # seconds that have left
        self._starts: list[float] = []  # of the words that have begun
        self._told = 0  # words

    def update_text(self, ids: Sequence[int], num_whole: int) -> None:
        """See `WordTimer.update_text`."""
        self._transcript.update(ids, num_whole)

    def add_scores(self, scores: NDArray[np.float32]) -> None:
        """See `WordTimer.add_scores`."""
        text, search = self._transcript, self._search
        if new := text.unit_silent[search.num_units :]:
            search.append_units(new)
            self._firsts = np.array(text.unit_starts)
        shown = scores[:, :, self._text_at : self._text_at + text.num_tokens]
        if (
            missing := text.num_tokens - shown.shape[2]
        ) > 0:  # more text than the slot has room for
            shown = np.pad(shown, ((0, 0), (0, 0), (0, missing)), constant_values=np.nan)
        search.push_frames(unit_log_attention(shown, self._firsts, self._floor))
        self._made += len(scores)
        if not search.at_end:
            self._arrived = None
        elif self._arrived is None:
            self._arrived = self._made

    def add_audio(self, samples: NDArray[np.int16], *, last: bool) -> list[Word]:
        """See `WordTimer.add_audio`."""
        text, path = self._transcript, self._search.path(ended=last)[: len(samples)]
        self._search.drop_frames(len(samples))
        heard = np.any(audible(samples), axis=1).tolist()
        for unit, sounds in zip(path, heard, strict=True):
            word, silent = text.unit_words[max(unit, 0)], text.unit_silent[max(unit, 0)]
            # A word whose sound has not been heard yet is still to begin. None begins twice.
            if (words := word + (silent or sounds)) > len(self._starts):
                self._begin(words)
            self._now += samples.shape[1] / self._rate
        if last:
            self._begin(len(text))
        return self._tell()

    def _begin(self, words: int) -> None:
        """Lets words begin now, until so many have."""
        self._starts += [round(self._now, 3)] * (words - len(self._starts))

    def _tell(self) -> list[Word]:
        """Words that have begun, as soon as their texts are known."""
        text, first = self._transcript, self._told
        self._told = min(len(self._starts), text.num_complete)
        starts = enumerate(self._starts[first : self._told], first)
        return [Word(text[i], start, None, False) for i, start in starts]

    @property
    def num_pending(self) -> int:
        """See `WordTimer.num_pending`."""
        return len(self._transcript) - self._told

    def frames_since_end(self, frame: int) -> int:
        """See `WordTimer.idle`."""
        return 0 if self._arrived is None else max(0, frame - self._arrived)


def with_ends(words: Sequence[Word], pcm: NDArray[np.int16], rate: int) -> tuple[Word, ...]:
    """Words of a speech that is over, each with its end: the last sound before the next begins.

    Args:
        words: In order.
        pcm: [samples], all of the speech.
        rate: Samples a second.
    """
    found: list[Word] = []
    borders = [round(word.start * rate) for word in words] + [len(pcm)]
    for word, start, stop in zip(words, borders, borders[1:], strict=False):
        sounds = np.flatnonzero(audible(pcm[start:stop]))
        end = start + int(sounds[-1]) + 1 if len(sounds) else stop
        found.append(replace(word, end=round(end / rate, 3)))
    return tuple(found)
