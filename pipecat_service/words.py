"""Splits the text of a language model into groups of words.

Pipecat commits text to the conversation by group and word, so a group that is released early is
spoken early, and a barge-in leaves the words that were spoken. Whole sentences would be released
late. With single tokens, Pipecat would withhold the words until their sentence is complete, and
lose the words that were spoken before a barge-in.
"""

from collections.abc import AsyncIterator

from pipecat.utils.text.base_text_aggregator import Aggregation, BaseTextAggregator, TextType

from megakernel_tts import split_words

_MAX_FIRST_WORDS = 2  # of a turn's first group, so that speech begins early
_MAX_WORDS = 6  # of a later group in which no clause ends
_WIDE_MARKS = "。，、；：！？｡"  # not followed by a space


def has_words(text: str) -> bool:
    """Whether a text contains a letter or a digit."""
    return any(char.isalnum() for char in text)


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
    return any(part.unspaced for part in split_words(word)[:1])


class WordGroupAggregator(BaseTextAggregator):
    """Releases the first two words of a turn, then clauses of up to six words.

    The groups of a turn concatenate to its text, whitespace included.
    """

    def __init__(self, *, language: str | None = None) -> None:
        super().__init__(aggregation_type=TextType.SENTENCE, language=language)
        self._text = ""
        self._max_words = _MAX_FIRST_WORDS

    @property
    def text(self) -> Aggregation:
        """Text that has not been released."""
        return Aggregation(self._text, TextType.SENTENCE)

    async def aggregate(self, text: str) -> AsyncIterator[Aggregation]:
        """Appends text.

        Args:
            text: The next part of the turn's text.

        Yields:
            Groups of whole words that are complete.
        """
        self._text += text
        while end := self._group_end():
            group, self._text = self._text[:end], self._text[end:]
            self._max_words = _MAX_WORDS
            yield Aggregation(group, TextType.SENTENCE)

    def _group_end(self) -> int | None:
        """End of the first group if it is complete: after one space behind its last word."""
        num_words = 0
        for word in split_words(self._text):
            if word.stop == len(self._text):
                return None  # the word may continue
            num_words += word.spoken
            if num_words and (num_words >= self._max_words or word.ends_clause):
                return word.stop + self._text[word.stop].isspace()
        return None

    async def flush(self) -> Aggregation | None:
        """Ends the turn's text and gives its last group, if any."""
        rest = self._text
        await self.reset()
        return Aggregation(rest, TextType.SENTENCE) if rest.strip() else None

    async def handle_interruption(self) -> None:
        """Discards text that has not been released."""
        await self.reset()

    async def reset(self) -> None:
        """Starts a new turn."""
        self._text = ""
        self._max_words = _MAX_FIRST_WORDS
