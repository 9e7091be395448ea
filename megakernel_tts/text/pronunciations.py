"""Pronunciation tables: words, and respellings that are spoken in their place."""

import json
import os
import re
import tomllib
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from megakernel_tts.checks import check_text
from megakernel_tts.errors import PronunciationError, TextError
from megakernel_tts.text.scripts import within_word

_MAX_ENTRIES = 10_000
_MAX_WORD_CHARACTERS = 64
_MAX_RESPELLING_CHARACTERS = 200


class Occurrence(NamedTuple):
    """A word of a table in a text.

    Attributes:
        stop: Index of the character after it.
        respelling: What is spoken in its place.
    """

    stop: int
    respelling: str


class Pronunciations(Mapping[str, str]):
    """Words and their respellings: `Pronunciations({"nginx": "engine ex"})`.

    A word in lower case stands for the word in any case, another one for itself only, so that `us`
    and `US` may differ. Words are found whole, except in scripts without spaces between words. Of
    words that begin at the same place the longest is found.

    An argument that takes a table takes a dictionary as well, which is checked at every use.
    """

    def __init__(self, table: Mapping[str, str] | None = None) -> None:
        """Checks a table.

        Args:
            table: Respellings by word; empty if None.

        Raises:
            PronunciationError: It is no table, an entry is invalid, or there are too many.
        """
        table = {} if table is None else table
        if not isinstance(table, Mapping):
            raise PronunciationError(
                f"The pronunciations are of type {type(table).__name__}; they must be a table of "
                "words and respellings."
            )
        if len(table) > _MAX_ENTRIES:
            raise PronunciationError(
                f"The pronunciation table has {len(table):,} entries; at most {_MAX_ENTRIES:,} "
                "are allowed."
            )
        self._set(dict(_checked(word, respelling) for word, respelling in table.items()))

    def _set(self, table: dict[str, str]) -> None:
        self._table = table
        self._words = sorted(table)
        first = {word[0] for word in table}
        first |= {char.upper() for char in first if len(char.upper()) == 1}
        self._start = re.compile(f"[{re.escape(''.join(sorted(first)))}]" if first else r"(?!)")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Pronunciations":
        """Reads a table from a file.

        Args:
            path: A JSON file (`.json`) or a TOML file, whose keys are the words.

        Raises:
            PronunciationError: It is no such file, or an entry is invalid.
            OSError: It cannot be read.
        """
        data = Path(path).read_bytes()
        is_json = Path(path).suffix == ".json"
        try:
            return cls((json.loads if is_json else tomllib.loads)(data.decode()))
        except PronunciationError as error:
            raise PronunciationError(f"{path}: {error}") from None
        except (ValueError, RecursionError) as error:
            kind = "JSON" if is_json else "TOML"
            raise PronunciationError(f"{path} is no valid {kind} in UTF-8: {error}.") from None

    def __getitem__(self, word: str) -> str:
        return self._table[word]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __or__(self, other: "Pronunciations") -> "Pronunciations":
        """Gives the entries of both tables; those of the second one replace others."""
        union = Pronunciations()
        union._set(self._table | other._table)
        return union

    def next_start(self, text: str, start: int) -> int:
        """Returns the first index from `start` on at which a word may begin, or the text's end."""
        match = self._start.search(text, start)
        return len(text) if match is None else match.start()

    def find(
        self, text: str, start: int, before: str, *, text_ended: bool
    ) -> Occurrence | Literal["incomplete"] | None:
        """Finds the longest word that begins at an index.

        Args:
            text: A part of a text.
            start: The index.
            before: The character before it, or "" at the start of the text.
            text_ended: Whether the text ends with `text`.

        Returns:
            The word; None if there is none. `incomplete` if that depends on text behind `text`.
        """
        if within_word(before, text[start]):
            return None
        found, stop = None, start
        while stop < len(text):
            stop += 1
            written = text[start:stop]
            respelling = self._table.get(written) or self._table.get(written.lower())
            if respelling is not None:
                if stop == len(text) and not text_ended:
                    return "incomplete"
                if not within_word(written[-1], text[stop : stop + 1]):
                    found = Occurrence(stop, respelling)
            if not (self._begins(written) or self._begins(written.lower())):
                return found
        return found if text_ended else "incomplete"

    def _begins(self, text: str) -> bool:
        """Whether a longer word begins with a text."""
        idx = bisect_left(self._words, text)
        words = self._words[idx : idx + 2]
        return any(word != text and word.startswith(text) for word in words)


def _checked(word: object, respelling: object) -> tuple[str, str]:
    """Returns an entry in normal form.

    Raises:
        PronunciationError: It is invalid.
    """
    try:
        word = _normal_form("The word", word, _MAX_WORD_CHARACTERS)
        if " " in word:
            raise TextError("The word has a space; an entry is for one word.")
        return word, _normal_form("The respelling", respelling, _MAX_RESPELLING_CHARACTERS)
    except TextError as error:
        raise PronunciationError(
            f"The entry {word!r:.100} of the pronunciation table is invalid. {error}"
        ) from None


def _normal_form(name: str, text: object, max_characters: int) -> str:
    """Returns a word or a respelling with single spaces.

    Raises:
        TextError: It is invalid.
    """
    check_text(text, name)
    assert isinstance(text, str)
    text = " ".join(unicodedata.normalize("NFC", text).split())
    if not any(map(str.isalnum, text)) or "<" in text or ">" in text:
        raise TextError(f"{name} is {text!r:.100}; it must have a letter or a digit, and no tag.")
    if len(text) > max_characters:
        raise TextError(f"{name} has {len(text)} characters; at most {max_characters} are allowed.")
    return text
