"""Splits the text of a language model into groups of words.

Pipecat commits text to the conversation by group and word, so a group that is released early is
spoken early, and a barge-in leaves the words that were spoken. Whole sentences would be released
late. With single tokens, Pipecat would withhold the words until their sentence is complete, and
lose the words that were spoken before a barge-in.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from pipecat.utils.text.base_text_aggregator import Aggregation, BaseTextAggregator, TextType

from megakernel_tts import WrittenWord, split_words
from pipecat_service.pace import WritingPace
from pipecat_service.rewriting import TextRewriting

_MAX_WORDS = 6  # of a group in which no clause ends
_PHRASE_WORDS = 14  # of a phrase that is spoken without a gap, however slowly it is written
_ONSET_S = 0.12  # of silence before speech, and of the last block that an output holds back
_LOOKAHEAD_WORDS = 2  # behind a boundary at which rewritten text is divided
_MAX_HELD_CHARS = 500  # behind the last block, not divided because of markup without an end
_WIDE_MARKS = "。，、；：！？｡"  # not followed by a space


@lru_cache(maxsize=64)  # held text is split several times before more of it arrives
def _split(text: str) -> tuple[WrittenWord, ...]:
    return tuple(split_words(text))


def has_words(text: str) -> bool:
    """Whether a text contains a letter or a digit outside tags."""
    return any(word.spoken for word in _split(text))


def needs_space(last: str, first: str) -> bool:
    """Whether a space is missing between two adjacent characters of different words.

    Args:
        last: Character before the boundary.
        first: Character after it.
    """
    spaced = last.isspace() or first.isspace()
    return not (spaced or last in _WIDE_MARKS or unspaced(last))


def unspaced(word: str) -> bool:
    """Whether the script of a word is written without spaces between words."""
    return any(part.unspaced for part in _split(word)[:1])


@dataclass
class WordGroup(Aggregation):
    """A group of words that are passed to the engine together.

    Attributes:
        continues_word: Whether its first word continues the last word of the group before.
        may_continue: Whether its last word may be continued by the next group, because it was
            released during a pause of the text.
    """

    continues_word: bool = False
    may_continue: bool = False


class WordGroupAggregator(BaseTextAggregator):
    """Releases the first words of a turn, then clauses or groups of a few words.

    The groups of a turn concatenate to its text, whitespace included, and none ends within a tag.
    The slower the model writes, the more words are held at the start of a phrase, so that speech
    does not run out of text within its first 14 words. Where text is rewritten, groups end at
    boundaries at which it may be divided (`TextRewriting`), two words later than otherwise.

    At a pause of the text, complete words are released first. The last word may go on, and is
    released when speech would otherwise stop.

    Attributes:
        pace: Pace of the text.
        phrase_starts: Whether a phrase starts with the next group.
        within_phrase: Whether the text that was released ends within a phrase.
    """

    def __init__(
        self,
        *,
        language: str | None = None,
        pace: WritingPace | None = None,
        rewriting: TextRewriting | None = None,
    ) -> None:
        """Starts without text.

        Args:
            language: Of the text, for Pipecat.
            pace: Records the arrival of the text.
            rewriting: Filters and transforms of the groups; None for none.
        """
        super().__init__(aggregation_type=TextType.SENTENCE, language=language)
        self._rewriting = rewriting
        self.pace = pace or WritingPace()
        self._text = ""
        self._checked_end = 0  # of the boundaries at which the text may not be divided
        self._words_released = False  # in the present pause, as far as the text may be divided
        self._all_released = False  # likewise, the last word included
        self._word_open = False  # the last word that was released may be continued
        self._turn_starts = True  # with the next group
        self._speech_starts = True  # with the next group
        self.phrase_starts = True
        self.within_phrase = False
        self._num_in_phrase = 0  # words released of the phrase
        self._clause_ended = False  # with the last word that arrived
        self._started_s = 0.0  # release of the group with which speech started
        self._num_released = 0  # words since then

    @property
    def text(self) -> Aggregation:
        """Text that has not been released."""
        return Aggregation(self._text, TextType.SENTENCE)

    def until_pause_s(self, *, in_gap: bool = False) -> float:
        """Seconds until the text pauses unless more arrives; 0 if it pauses.

        Args:
            in_gap: See `WritingPace.pause_s`.
        """
        return self.pace.until_pause_s(clause_ended=self._clause_ended, in_gap=in_gap)

    @property
    def until_release_s(self) -> float:
        """Seconds until complete words are to be released unless text arrives; infinite if none."""
        complete = any(word.spoken and word.stop < len(self._text) for word in self._held_words)
        return self.until_pause_s() if complete and not self._words_released else float("inf")

    @property
    def holds_words(self) -> bool:
        """Whether words are held that a pause may release, the last one included."""
        return not self._all_released and any(word.spoken for word in self._held_words)

    @property
    def _held_words(self) -> tuple[WrittenWord, ...]:
        return _split(self._text)

    async def aggregate(self, text: str) -> AsyncIterator[Aggregation]:
        """Appends text.

        Args:
            text: The next part of the turn's text.

        Yields:
            Groups of whole words that are complete.
        """
        num_words_before = _num_spoken(self._text)
        self._text += text
        self._words_released = self._all_released = False
        self.pace.add(_num_spoken(self._text) - num_words_before)
        if words := self._held_words:
            self._clause_ended = words[-1].ends_clause
        while end := await self._next_end():
            yield self._take(end)

    async def release(self, *, last_word: bool) -> Aggregation | None:
        """Releases held text up to the last boundary at which it may be divided: it pauses.

        Text without words at the start of a turn is held until words follow or the turn ends.

        Args:
            last_word: Whether to release the last word as well, which may be incomplete.
        """
        self._words_released, self._all_released = True, last_word
        ends = _word_ends(self._text)
        if last_word and self._text and not _split(self._text)[-1].in_tag:
            ends.append(len(self._text))
        for end in reversed(ends):
            spoken = not self._turn_starts or has_words(self._text[:end])
            if spoken and await self._may_divide(self._text, end):
                return self._take(end)
        return None

    def restart_speech(self) -> None:
        """Has the next group start speech, because all released text is spoken to its end."""
        self._speech_starts = self.phrase_starts = True
        self._num_in_phrase = 0

    def _take(self, end: int) -> WordGroup:
        text, self._text = self._text[:end], self._text[end:]
        continues_word = self._word_open and not text[0].isspace()
        self._word_open = not self._text and needs_space(text[-1], "a")
        self._checked_end = 0
        self._turn_starts = False
        if self._speech_starts:
            self._started_s, self._num_released = self.pace.now_s, 0
        words = _split(text)
        self._num_released += len(words)
        self._num_in_phrase += len(words)
        if words:
            self.within_phrase = not words[-1].ends_clause
        too_long = self.pace.slow and self._num_in_phrase >= _PHRASE_WORDS
        self.phrase_starts = too_long or not self.within_phrase
        if self.phrase_starts:
            self._num_in_phrase = 0
        self._speech_starts = False
        return WordGroup(text, TextType.SENTENCE, continues_word, self._word_open)

    async def _next_end(self) -> int | None:
        """End of the first group if it is complete and the text may be divided there.

        Each boundary is checked once, when two words behind it are complete.
        """
        min_end = self._group_end()
        if min_end is None or self._rewriting is None or not self._rewriting.active:
            return min_end
        block_end = self._rewriting.block_end(self._text)
        text = self._text[: block_end + _MAX_HELD_CHARS]
        ends = [end for end in _word_ends(text) if end >= min_end]
        spoken = [w.start for w in _split(text) if w.spoken and w.stop < len(text)]
        for end in ends if len(spoken) >= _LOOKAHEAD_WORDS else ():
            if self._checked_end < end <= spoken[-_LOOKAHEAD_WORDS]:
                if await self._may_divide(text, end):
                    return end
                self._checked_end = end
        if len(self._text) < block_end + _MAX_HELD_CHARS:
            return None
        return next((end for end in ends if end >= block_end), None)

    async def _may_divide(self, text: str, end: int) -> bool:
        if self._rewriting is None or not self._rewriting.active:
            return True
        return await self._rewriting.may_divide(text, end)

    def _group_end(self) -> int | None:
        """End of the first group if it is complete: after one space behind its last word."""
        num_words, max_words = 0, self._max_words()
        for word in _split(self._text):
            if word.stop == len(self._text):
                return None  # the word may continue
            num_words += word.spoken
            complete = num_words >= max_words or word.ends_clause
            if num_words and complete and not _joined_by_tag(self._text, word.stop):
                return word.stop + self._text[word.stop].isspace()
        return None

    def _max_words(self) -> int:
        """Words of the next group in which no clause ends.

        The engine takes one word per codec frame or less. Groups are so large that the speech of
        the released words lasts until the next group is written.
        """
        words_per_s = self.pace.words_per_s or 0.0
        if self._speech_starts or (self.phrase_starts and self.pace.slow):
            return _words_before_phrase(words_per_s, self.pace.codec_frame_s)
        speech_s = self._num_released * self.pace.codec_frame_s - _ONSET_S
        lead_s = speech_s - (self.pace.now_s - self._started_s)
        num_words = lead_s / 2 * words_per_s  # half, so that a pause is noticed in time
        return int(min(_MAX_WORDS, num_words)) if num_words >= 1 else 1

    async def flush(self) -> Aggregation | None:
        """Ends the turn's text and gives its last group, if any."""
        group = self._take(len(self._text)) if self._text.strip() else None
        if group is not None:
            group.may_continue = False
        await self.reset()
        return group

    async def handle_interruption(self) -> None:
        """Discards text that has not been released."""
        await self.reset()

    async def reset(self) -> None:
        """Starts a new turn."""
        self._text = ""
        self._checked_end = 0
        self._clause_ended = self._word_open = False
        self._turn_starts = True
        self.restart_speech()


def _words_before_phrase(words_per_s: float, codec_frame_s: float) -> int:
    """Words that must be written before a phrase is spoken, so that it has no gap.

    Speech of k words' tokens lasts k codec frames without the silence before it. If it begins after
    m words, word k + 1 is written in time if m / pace + k * frame - silence >= (k + 1) / pace. For
    a model that is slower than the engine, the last word decides, otherwise the first one after m.
    """
    if not words_per_s:
        return _PHRASE_WORDS
    if words_per_s * codec_frame_s < 1:
        missing = _PHRASE_WORDS * (1 - codec_frame_s * words_per_s)
        return ceil(missing + (codec_frame_s + _ONSET_S) * words_per_s)
    return ceil((_ONSET_S + 1 / words_per_s) / codec_frame_s)


def _word_ends(text: str) -> list[int]:
    """Indices after the complete words of a text and one space behind each."""
    ends = [word.stop for word in _split(text) if word.stop < len(text)]
    return [end + text[end].isspace() for end in ends if not _joined_by_tag(text, end)]


def _joined_by_tag(text: str, end: int) -> bool:
    """Whether a tag takes the place of the space behind a word, which Pipecat would add."""
    return text[end - 1] == ">" and not text[end].isspace()


def _num_spoken(text: str) -> int:
    return sum(word.spoken for word in _split(text))
