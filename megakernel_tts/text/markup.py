"""From written text to spoken text: breaks, spelled words, respelled words, tags that are removed.

Text may arrive in portions of any size. It is held back only while more of it decides how it is
spoken: the beginning of what may be a tag, of a word of the pronunciation table, or of a word that
is spelled.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from megakernel_tts.text.pronunciations import Pronunciations
from megakernel_tts.text.tags import Tag, read_tag

_MAX_SPELLED_CHARACTERS = 64  # of a word; a longer one is spelled as several
_SPACES = re.compile(r"(\s+)")


class Spoken(NamedTuple):
    """A part of the text to speak.

    Attributes:
        text: What is spoken; not empty.
        written: The word that is written in its place; None if it is spoken as it is written.
    """

    text: str
    written: str | None = None


class Break(NamedTuple):
    """Silence between two parts of the text.

    Attributes:
        seconds: Its duration, above 0.
    """

    seconds: float


TextPart = Spoken | Break


class Replacement(NamedTuple):
    """A word that is spoken in another way than it is written.

    Attributes:
        start: Index of its first character in the segment's spoken text, which is normalised.
        stop: Index of the character after its last one.
        written: The word as it is written; "" if it began in the segment before.
    """

    start: int
    stop: int
    written: str


class Markup:
    """Reads the markup of one text. The parts do not depend on how the text arrives."""

    def __init__(self, pronunciations: Pronunciations | None = None) -> None:
        """Starts without text.

        Args:
            pronunciations: Respellings of words, or None.
        """
        self._pronunciations = pronunciations or None
        self._tag = ""  # the beginning of what may be a tag
        self._word = ""  # the beginning of what may be a word of the table, or of a spelled word
        self._before_word = ""  # the character before it
        self._last = ""  # character of the text without tags
        self._removed: Tag | None = None  # behind it; of several tags one that separates words
        self._spelling = False
        self._after_break = False  # until the next letter or digit
        self._marks = ""  # punctuation and spaces after a break

    def push(self, text: str) -> Iterator[TextPart]:
        """Adds text; yields what can be spoken now."""
        text, self._tag = self._tag + text, ""
        yield from self._read(text, text_ended=False)

    def flush(self) -> Iterator[TextPart]:
        """Ends the word that is held back. The beginning of a tag stays: it is not spoken."""
        yield from self._end_word()

    def end(self) -> Iterator[TextPart]:
        """Ends the text. The beginning of a tag is text after all."""
        text, self._tag = self._tag, ""
        yield from self._read(text, text_ended=True)
        yield from self._end_word()

    def _read(self, text: str, *, text_ended: bool) -> Iterator[TextPart]:
        """Separates tags from text."""
        start = idx = 0
        while (idx := text.find("<", idx)) >= 0:
            tag = read_tag(text, idx)
            if isinstance(tag, Tag):
                yield from self._write(text[start:idx])
                yield from self._apply(tag)
                start = idx = idx + len(tag.text)
            elif tag == "incomplete" and not text_ended:
                yield from self._write(text[start:idx])
                self._tag = text[idx:]
                return
            else:
                idx += 1
        yield from self._write(text[start:])

    def _apply(self, tag: Tag) -> Iterator[TextPart]:
        if tag.kind == "break" and tag.seconds > 0:
            yield from self._end_word()
            yield Break(tag.seconds)
            self._after_break, self._marks, self._last, self._removed = True, "", "", None
            return
        if tag.kind in ("spell", "end of spell"):
            yield from self._end_word()
            self._spelling = tag.kind == "spell"
        if self._removed is None or tag.separates:
            self._removed = tag

    def _write(self, text: str) -> Iterator[TextPart]:
        """Adds text that has no tag."""
        if not text:
            return
        if self._removed is not None and self._removed.divides_words(self._last, text[0]):
            text = " " + text  # the tag was in its place
        self._removed = None
        if self._after_break:
            text = self._marks + text
            num_marks = next((i for i, char in enumerate(text) if char.isalnum()), len(text))
            # Punctuation apart from the next word belongs to the text before the break.
            first = num_marks - len(_SPACES.split(text[:num_marks])[-1])
            self._after_break, self._marks = num_marks == len(text), text[first:num_marks]
            if self._after_break:
                return
            text, self._marks = text[first:], ""
        if not self._word:
            self._before_word = self._last
        self._last = text[-1]
        if self._spelling:
            yield from self._spell(text)
        elif self._pronunciations is not None:
            yield from self._respell(text, self._pronunciations, text_ended=False)
        else:
            yield Spoken(text)

    def _end_word(self) -> Iterator[TextPart]:
        if self._spelling:
            yield from self._spell_word()
        elif self._pronunciations is not None:
            yield from self._respell("", self._pronunciations, text_ended=True)

    def _respell(self, text: str, table: Pronunciations, *, text_ended: bool) -> Iterator[TextPart]:
        """Adds text; replaces the words of the table in it."""
        text = self._word + text
        start = idx = 0
        while (idx := table.next_start(text, idx)) < len(text):
            before = text[idx - 1] if idx else self._before_word
            word = table.find(text, idx, before, text_ended=text_ended)
            if word == "incomplete":
                break
            if word is None:
                idx += 1
                continue
            if start < idx:
                yield Spoken(text[start:idx])
            yield Spoken(word.respelling, text[idx : word.stop])
            start = idx = word.stop
        if start < idx:
            yield Spoken(text[start:idx])
        if idx:
            self._before_word = text[idx - 1]
        self._word = text[idx:]

    def _spell(self, text: str) -> Iterator[TextPart]:
        """Adds text that is spelled, word by word."""
        for i, piece in enumerate(_SPACES.split(text)):
            if i % 2:  # spaces
                yield from self._spell_word()
                yield Spoken(piece)
                continue
            self._word += piece
            while len(self._word) > _MAX_SPELLED_CHARACTERS:
                rest = self._word[_MAX_SPELLED_CHARACTERS:]
                self._word = self._word[:_MAX_SPELLED_CHARACTERS]
                yield from self._spell_word()
                yield Spoken(" ")
                self._word = rest

    def _spell_word(self) -> Iterator[TextPart]:
        word, self._word = self._word, ""
        spoken = ""
        for char in word:
            if char.isalnum() and any(map(str.isalnum, spoken)):
                spoken += " "
            spoken += char.upper() if len(char.upper()) == 1 else char
        if word:
            yield Spoken(spoken, None if spoken == word else word)
