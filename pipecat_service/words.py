"""Text that arrives from a language model, cut into words and groups of words.

Pipecat commits text to the conversation group by group and word by word, so a group that leaves
early is spoken early, and a barge-in leaves what was heard of it. Whole sentences would come late;
of single tokens Pipecat would hold the words back until their sentence is written, and forget those
that were heard before a barge-in.
"""

from collections.abc import AsyncIterator

from pipecat.utils.text.base_text_aggregator import Aggregation, BaseTextAggregator, TextType

from megakernel_tts import split_words

_FIRST = 2  # words of a turn's first group at most: speech may begin
_MOST = 6  # words of a later group at most, if no clause ends before
_WIDE_MARKS = "。，、；：！？｡"  # no space follows these


def has_words(text: str) -> bool:
    """Whether there is anything in it to say."""
    return any(char.isalnum() for char in text)


def needs_space(last: str, first: str) -> bool:
    """Whether two characters belong to different words, though no space is between them."""
    spaced = last.isspace() or first.isspace()
    return not (spaced or last in _WIDE_MARKS or unspaced(last))


def unspaced(word: str) -> bool:
    """Whether a word's script puts no spaces between words."""
    return any(part.unspaced for part in split_words(word)[:1])


class WordGroupAggregator(BaseTextAggregator):
    """Releases a turn's first words at once, then clauses.

    The groups of a turn add up to its text, whitespace included.
    """

    def __init__(self, *, language: str | None = None) -> None:
        super().__init__(aggregation_type=TextType.SENTENCE, language=language)
        self._text = ""
        self._limit = _FIRST

    @property
    def text(self) -> Aggregation:
        """What was not released yet."""
        return Aggregation(self._text, TextType.SENTENCE)

    async def aggregate(self, text: str) -> AsyncIterator[Aggregation]:
        """Takes more text.

        Yields:
            Groups of whole words, as many as are complete.
        """
        self._text += text
        while end := self._group_end():
            group, self._text = self._text[:end], self._text[end:]
            self._limit = _MOST
            yield Aggregation(group, TextType.SENTENCE)

    def _group_end(self) -> int | None:
        """Where the first group ends, once it is complete: one space after its last word."""
        words = 0
        for word in split_words(self._text):
            if word.stop == len(self._text):
                return None  # more of the word may come
            words += word.spoken
            if words and (words >= self._limit or word.ends_clause):
                return word.stop + self._text[word.stop].isspace()
        return None

    async def flush(self) -> Aggregation | None:
        """Ends the turn's text; gives the rest of it, if any."""
        rest = self._text
        await self.reset()
        return Aggregation(rest, TextType.SENTENCE) if rest.strip() else None

    async def handle_interruption(self) -> None:
        """Forgets text that will not be spoken."""
        await self.reset()

    async def reset(self) -> None:
        """Starts a new turn."""
        self._text = ""
        self._limit = _FIRST
