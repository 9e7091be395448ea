"""A text's words, and which of its tokens are which word's."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Scripts without spaces between words: kana and Han, in which each character counts as a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_TOKEN = re.compile(rf"[{_UNSPACED}][^\s\w]*|[^\s{_UNSPACED}]+")
_CLAUSE_END = re.compile(r"[,;:.!?…—。，、；：！？｡][\"'”’»)\]}」』）】]*$")
_OPEN = re.compile(r"\s\S*$")  # behind a word, what may yet become another
_TAG = {"<": True, "[": True, ">": False, "]": False}  # until a space: "[laugh]", "<break>"


@dataclass(frozen=True)
class Word:
    """A word and when it is spoken, in seconds from the start of its stream.

    Attributes:
        text: With the punctuation that touches it. Where no spaces are between words (Chinese,
            Japanese), the characters of one of the model's tokens.
        start: When it begins.
        end: When it has been said; None in a stream, where that lies in audio still to come.
        estimated: Whether the times are guessed from the words' lengths and the pauses, because
            the model's attention was not calibrated.
    """

    text: str
    start: float
    end: float | None
    estimated: bool


@dataclass(frozen=True)
class WrittenWord:
    """A word of a text, or punctuation that stands alone.

    Attributes:
        text: With the punctuation that touches it.
        start: Its first character's place in the text.
        spoken: Whether there is anything in it to say.
        unspaced: Whether its script puts no spaces between words.
        ends_clause: Whether a speaker might pause after it.
    """

    text: str
    start: int
    spoken: bool
    unspaced: bool
    ends_clause: bool

    @property
    def stop(self) -> int:
        """The place after its last character."""
        return self.start + len(self.text)


def split_words(text: str) -> list[WrittenWord]:
    """The words of a text, and what stands alone between them, in order."""
    return [_word(match) for match in _TOKEN.finditer(text)]


def _word(match: re.Match[str]) -> WrittenWord:
    text = match[0]
    return WrittenWord(
        text,
        match.start(),
        spoken=any(char.isalnum() for char in text),
        unspaced=bool(re.match(f"[{_UNSPACED}]", text)),
        ends_clause=bool(_CLAUSE_END.search(text)),
    )


class Transcript:
    """A growing text, cut into units for the search and into words for the listener.

    A unit is a token that sounds, together with the tokens that only finish its last character; or
    a run of tokens that make no sound, such as punctuation and tags. A word begins with a unit, so
    that characters which share a token are one word. Units and words only ever get more; the last
    ones may grow.

    Attributes:
        text: So far.
        firsts: Each unit's first token.
        silent: Whether a unit makes no sound.
        word: Each unit's word; a silent one's is that of the sound before it, -1 if there is none.
        tokens: How many the text has.
    """

    def __init__(self, spell: Callable[[Sequence[int]], list[bytes]]) -> None:
        """Starts with no text.

        Args:
            spell: Gives each token's UTF-8 bytes.
        """
        self.text = ""
        self.unit_starts: list[int] = []
        self.unit_silent: list[bool] = []
        self.unit_words: list[int] = []
        self._spell = spell
        self.num_tokens = 0
        self._starts: list[int] = []  # the words' places in the text
        self._in_tag = False
        self._complete = 0
        self._ended = False  # whether no later text can join what is there

    def __len__(self) -> int:
        """How many words there are."""
        return len(self._starts)

    @property
    def num_complete(self) -> int:
        """How many words no later text can change."""
        return self._complete

    def __getitem__(self, word: int) -> str:
        """A word's text, with what stands alone behind it, once that certainly does."""
        if word + 1 < len(self):
            return self.text[self._starts[word] : self._starts[word + 1]].rstrip()
        last = self.text[self._starts[word] :]
        return (last if self._ended else _OPEN.sub("", last)).rstrip()

    def update(self, ids: Sequence[int], num_whole: int) -> None:
        """Takes the text as far as it is known.

        Args:
            ids: All tokens so far, those of earlier calls first; the last one ends a character.
            num_whole: How many of them end with a complete word.
        """
        new = ids[self.num_tokens :]  # once: the writer may add to them meanwhile
        if new:
            self._cut(self._read(self._spell(new)))
            self.num_tokens += len(new)
        self._ended = num_whole >= self.num_tokens or self.text[-1:].isspace()
        last = not self._ended and bool(self._starts)
        self._complete = max(self._complete, len(self) - last)

    def _cut(self, tokens: list[tuple[int, int | None, bool, bool]]) -> None:
        """Cuts new text into units and words; see `_read`."""
        tail = self._starts[-1] if self._starts else 0
        starts = [tail + word.start for word in split_words(self.text[tail:])]
        for token, letter, silent, inside in tokens:
            if letter is not None:
                start = starts[bisect_right(starts, letter) - 1]
                if not self._starts or start > self._starts[-1]:
                    self._starts.append(start)
            if not self.unit_starts or not (inside or (silent and self.unit_silent[-1])):
                self.unit_starts.append(token)
                self.unit_silent.append(silent)
                self.unit_words.append(len(self) - 1)

    def _read(self, tokens: list[bytes]) -> list[tuple[int, int | None, bool, bool]]:
        """Takes more text.

        Returns:
            For each token its number, the place of its first letter or digit in the text, if it has
            any, whether it makes no sound, and whether it begins inside a character.
        """
        new = b"".join(tokens).decode(errors="replace")
        char_at: dict[int, int] = {}  # by the byte where it begins
        sounding: dict[int, bool] = {}  # letters and digits
        size = 0
        for place, char in enumerate(new, len(self.text)):
            char_at[size] = place
            self._in_tag = _TAG.get(char, self._in_tag and not char.isspace())
            if char.isalnum():
                sounding[size] = not self._in_tag
            size += len(char.encode())
        self.text += new
        found: list[tuple[int, int | None, bool, bool]] = []
        start = 0
        for number, token in enumerate(tokens, self.num_tokens):
            letters = [byte for byte in range(start, start + len(token)) if byte in sounding]
            letter = char_at[letters[0]] if letters else None
            silent = not any(sounding[byte] for byte in letters)
            found.append((number, letter, silent, start not in char_at))
            start += len(token)
        return found
