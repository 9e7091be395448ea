"""Text that arrives from a language model, cut into words and groups of words.

Pipecat commits text to the conversation group by group and word by word, so a group that leaves
early is spoken early, and a barge-in leaves what was heard of it.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pipecat.utils.text.base_text_aggregator import Aggregation, BaseTextAggregator, TextType

_FIRST = 2  # words of a turn's first group at most: speech may begin
_MOST = 6  # words of a later group at most, if no clause ends before

# Scripts without spaces between words: kana and Han, in which each character counts as a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_TOKEN = re.compile(rf"[{_UNSPACED}][^\s\w]*|[^\s{_UNSPACED}]+")
_CLAUSE_END = re.compile(r"[,;:.!?…—。，、；：！？｡][\"'”’»)\]}」』）】]*$")


@dataclass(frozen=True)
class Word:
    """A word of a text.

    Attributes:
        text: With the punctuation that touches it.
        unspaced: Whether its script puts no spaces between words.
        ends_clause: Whether a speaker might pause after it.
    """

    text: str
    unspaced: bool
    ends_clause: bool


def split_words(text: str) -> list[Word]:
    """The words of a text; punctuation that stands alone is none."""
    return [_word(match) for match in _TOKEN.finditer(text) if _spoken(match[0])]


def has_words(text: str) -> bool:
    """Whether there is anything in it to say."""
    return _spoken(text)


def needs_space(last: str, first: str) -> bool:
    """Whether two characters belong to different words, though no space is between them."""
    spaced = last.isspace() or first.isspace()
    return not (spaced or re.match(f"[{_UNSPACED}。，、；：！？｡]", last))


def _spoken(token: str) -> bool:
    return any(char.isalnum() for char in token)


def _word(match: re.Match[str]) -> Word:
    token = match[0]
    unspaced = bool(re.match(f"[{_UNSPACED}]", token))
    return Word(token, unspaced, bool(_CLAUSE_END.search(token)))


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
        for match in _TOKEN.finditer(self._text):
            if match.end() == len(self._text):
                return None  # more of the word may come
            words += _spoken(match[0])
            if words and (words >= self._limit or _CLAUSE_END.search(match[0])):
                return match.end() + self._text[match.end()].isspace()
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
