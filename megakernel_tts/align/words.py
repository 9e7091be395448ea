"""Words of a text, and the assignment of tokens to words."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megakernel_tts.text.markup import Replacement
from megakernel_tts.text.scripts import UNSPACED
from megakernel_tts.text.tags import TAG, TAG_START, Tag, read_tag

_TAGS = rf"(?:{TAG}|{TAG_START})"
# Scripts without spaces between words (kana and Han): each character counts as a word.
_WRITTEN_WORD = re.compile(
    rf"{_TAGS}*[{UNSPACED}](?:{_TAGS}|[^\s\w])*|(?:{_TAGS}|[^\s{UNSPACED}])+"
)
_SPOKEN_WORD = re.compile(rf"[{UNSPACED}][^\s\w]*|[^\s{UNSPACED}]+")
_STARTS_UNSPACED = re.compile(f"[{UNSPACED}]")
_TAG = re.compile(TAG)
_OPEN_TAG = re.compile(TAG_START)
_BREAK = re.compile(r"<break\b", re.IGNORECASE)
_CLAUSE_ENDS = tuple(",;:.!?…—。，、；：！？｡")
_CLOSING = "\"'”’»)]}」』）】"  # marks that may follow the end of a clause
_INCOMPLETE_WORD = re.compile(r"\s\S*$")  # characters after a word that may belong to the next one
_LETTER_OR_DIGIT = re.compile(r"[A-Za-z0-9]")  # of ASCII
_TAG_OPENING = re.compile(r"[<\[]")
_OPENS_TAG = {"<": True, "[": True, ">": False, "]": False}  # "[laugh]", "<3"; ends at a space


@dataclass(frozen=True)
class Word:
    """A word and its times, in seconds from the start of the stream.

    Attributes:
        text: The word with adjacent punctuation, as it was written. In scripts without spaces
            (Chinese, Japanese), the characters of one of the model's tokens.
        start: Start of the word.
        end: End of the word; None in a stream, where it is in audio that does not exist yet.
        estimated: Whether the times are estimated from word lengths and pauses, because the model's
            attention was not calibrated.
    """

    text: str
    start: float
    end: float | None
    estimated: bool


@dataclass(frozen=True)
class WrittenWord:
    """A word of a text, or punctuation or tags between spaces.

    Attributes:
        text: The word with adjacent punctuation and tags.
        start: Index of its first character in the text.
        spoken: Whether it contains a letter or digit outside tags.
        unspaced: Whether its script has no spaces between words.
        ends_clause: Whether it ends with punctuation at which a speaker may pause, or has a break.
        in_tag: Whether it ends within a tag, or within what may become one.
    """

    text: str
    start: int
    spoken: bool
    unspaced: bool
    ends_clause: bool
    in_tag: bool = False

    @property
    def stop(self) -> int:
        """Index of the character after the last one."""
        return self.start + len(self.text)


def split_words(text: str) -> list[WrittenWord]:
    """Splits a text into words, and punctuation and tags between spaces, in order.

    A tag such as `<break time="1s"/>` is not divided, whatever it contains. It belongs to the word
    before it.
    """
    return [*_iterate_words(text)]


def has_spoken_words(text: str) -> bool:
    """Whether a text has a letter or digit outside tags; reads it up to the first such word."""
    return any(word.spoken for word in _iterate_words(text))


def _iterate_words(text: str) -> Iterator[WrittenWord]:
    """The words of `split_words`, one after the other."""
    for match in _WRITTEN_WORD.finditer(text):
        cuts = [match.start(), *_starts_behind_tags(match), match.end()]
        for start, stop in pairwise(cuts):
            yield _written_word(text, start, stop)


def _starts_behind_tags(match: re.Match[str]) -> Iterator[int]:
    """Indices at which a word begins behind a tag, without a space."""
    if "<" not in match[0]:
        return
    text, before, removed = match.string, "", None
    position = match.start()
    while position < match.end():
        tag = read_tag(text, position) if text[position] == "<" else None
        if isinstance(tag, Tag):
            if removed is None or tag.separates:
                removed = tag
            position += len(tag.text)
            continue
        if (
            removed is not None
            and before
            and (removed.kind == "break" or removed.divides_words(before, text[position]))
        ):
            yield position
        before, removed = text[position], None
        position += 1


def _written_word(text: str, start: int, stop: int) -> WrittenWord:
    written = untagged = text[start:stop]
    has_break, open_tag = False, None
    if "<" in written:
        has_break, untagged = bool(_BREAK.search(written)), _TAG.sub("", written)
        open_tag = _OPEN_TAG.search(untagged) if stop == len(text) else None
        untagged = untagged[: open_tag.start()] if open_tag else untagged
    return WrittenWord(
        written,
        start,
        spoken=any(map(str.isalnum, untagged)),
        unspaced=bool(_STARTS_UNSPACED.match(untagged)),
        ends_clause=has_break or untagged.rstrip(_CLOSING).endswith(_CLAUSE_ENDS),
        in_tag=open_tag is not None,
    )


class _Token(NamedTuple):
    """A token of the text.

    Attributes:
        token_idx: Index in the text's tokens.
        letter: Index in the text of its first letter or digit; None if it has none.
        silent: Whether it makes no sound.
        continues_character: Whether its first byte is not the first of a character.
    """

    token_idx: int
    letter: int | None
    silent: bool
    continues_character: bool


class Transcript:
    """A text that grows, divided into units for the alignment and into words.

    A unit is one token with letters or digits, together with the following tokens that complete its
    last character, or a run of silent tokens (punctuation, tags). A word begins with a unit, so
    characters that share a token are one word. Units and words are only appended; the last ones may
    grow. All that is spoken in place of a written word is one word, whose text is the written one.

    Attributes:
        text: The spoken text so far.
        num_tokens: Tokens of the text.
        unit_starts: The first token of each unit.
        unit_silent: Whether each unit makes no sound.
        unit_words: The word of each unit. A silent unit has the word before it, or -1. The rest of
            a word that began in the segment before belongs to no word: -1.
    """

    def __init__(self, token_bytes: Callable[[Sequence[int]], list[bytes]]) -> None:
        """Starts with an empty text.

        Args:
            token_bytes: Returns the UTF-8 bytes of tokens.
        """
        self.text = ""
        self.num_tokens = 0
        self.unit_starts: list[int] = []
        self.unit_silent: list[bool] = []
        self.unit_words: list[int] = []
        self._token_bytes = token_bytes
        self._word_starts: list[int] = []  # indices in the text
        self._replacements: Sequence[Replacement] = ()
        self._in_tag = False
        self._num_complete = 0
        self._ends_whole = False  # whether later text cannot extend the last word

    def __len__(self) -> int:
        """The number of words."""
        return len(self._word_starts)

    @property
    def num_complete(self) -> int:
        """The number of words that later text cannot change."""
        return self._num_complete

    def __getitem__(self, word: int) -> str:
        """The text of a word with the punctuation after it, as it was written.

        Punctuation at the end of the text is included once it cannot begin another word.
        """
        start, stop = self._extent(word)
        written = ""
        for replacement in self._replacements:
            if start <= replacement.start < stop:
                written += self.text[start : replacement.start] + replacement.written
                start = replacement.stop
        written += self.text[start:stop]
        if word + 1 == len(self) and not self._ends_whole:
            written = _INCOMPLETE_WORD.sub("", written)
        return written.rstrip()

    def spoken(self, word: int) -> str:
        """The text that is spoken for a word, with the punctuation after it."""
        start, stop = self._extent(word)
        return self.text[start:stop].rstrip()

    def _extent(self, word: int) -> tuple[int, int]:
        """Indices in the text of a word and of the next one."""
        last = word + 1 == len(self)
        return self._word_starts[word], len(self.text) if last else self._word_starts[word + 1]

    def update(
        self, ids: Sequence[int], num_whole: int, replacements: Sequence[Replacement] = ()
    ) -> None:
        """Adds the new tokens of a text.

        Args:
            ids: All tokens so far. Tokens of earlier calls must be the same, and the last token
                must complete a character. Another thread may append to them.
            num_whole: Number of tokens up to the last word boundary that later text cannot move.
            replacements: All those of the tokens so far, in order, and maybe later ones.
        """
        self._replacements = replacements
        new = ids[self.num_tokens :]  # read once, as the sequence may grow
        if new:
            self._append(self._parse(self._token_bytes(new)))
            self.num_tokens += len(new)
        self._ends_whole = num_whole >= self.num_tokens or self.text[-1:].isspace()
        complete = self._ends_whole and not self._in_replacement()
        num_open = int(not complete and bool(self._word_starts))
        self._num_complete = max(self._num_complete, len(self) - num_open)

    def _append(self, tokens: list[_Token]) -> None:
        """Extends units and words by tokens whose characters were added to the text."""
        tail = self._word_starts[-1] if self._word_starts else 0
        starts = [match.start() for match in _SPOKEN_WORD.finditer(self.text, tail)]
        if self._replacements:
            starts = [start for start in starts if not self._continues(start)]
        for token in tokens:
            if token.letter is not None and (count := bisect_right(starts, token.letter)):
                start = starts[count - 1]
                if not self._word_starts or start > self._word_starts[-1]:
                    self._word_starts.append(start)
            extends_silence = token.silent and bool(self.unit_silent) and self.unit_silent[-1]
            if not self.unit_starts or not (token.continues_character or extends_silence):
                self.unit_starts.append(token.token_idx)
                self.unit_silent.append(token.silent)
                self.unit_words.append(len(self) - 1)

    def _continues(self, start: int) -> bool:
        """Whether what begins at an index of the text continues a word that was written before."""
        return any(r.start + bool(r.written) <= start < r.stop for r in self._replacements)

    def _in_replacement(self) -> bool:
        """Whether the text ends within what is spoken in place of a word."""
        return any(r.start < len(self.text) < r.stop for r in self._replacements)

    def _parse(self, tokens: list[bytes]) -> list[_Token]:
        """Adds the characters of tokens to the text and classifies the tokens."""
        new_text = b"".join(tokens).decode(errors="replace")
        if new_text.isascii() and not self._in_tag and not _TAG_OPENING.search(new_text):
            return self._parse_ascii(tokens, new_text)
        char_at: dict[int, int] = {}  # first byte of a character -> its index in the text
        sounds: dict[int, bool] = {}  # first byte of a letter or digit -> whether outside tags
        in_tag, num_bytes = self._in_tag, 0
        for i, char in enumerate(new_text, len(self.text)):
            char_at[num_bytes] = i
            if char.isalnum():
                sounds[num_bytes] = not in_tag
            elif char in _OPENS_TAG:
                in_tag = _OPENS_TAG[char]
            elif char.isspace():
                in_tag = False
            num_bytes += 1 if char.isascii() else len(char.encode())
        self._in_tag = in_tag
        self.text += new_text
        parsed: list[_Token] = []
        start = 0
        for index, token in enumerate(tokens, self.num_tokens):
            letters = [byte for byte in range(start, start + len(token)) if byte in sounds]
            letter = char_at[letters[0]] if letters else None
            silent = not any(sounds[byte] for byte in letters)
            parsed.append(_Token(index, letter, silent, start not in char_at))
            start += len(token)
        return parsed

    def _parse_ascii(self, tokens: list[bytes], new_text: str) -> list[_Token]:
        """The same for ASCII outside tags, of which each byte is a character."""
        begin, start = len(self.text), 0
        self.text += new_text
        parsed: list[_Token] = []
        for index, token in enumerate(tokens, self.num_tokens):
            stop = start + len(token)
            found = _LETTER_OR_DIGIT.search(new_text, start, stop)
            letter = begin + found.start() if found else None
            parsed.append(_Token(index, letter, found is None, start == len(new_text)))
            start = stop
        return parsed
