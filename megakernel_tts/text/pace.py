"""How long a text takes to say at an ordinary pace."""

import unicodedata
from functools import lru_cache

_WORD = 3.0  # frames of a word's first letter, which may be all of it


def ordinary_frames(text: str, before: str = "") -> float:
    """How many 80 ms frames the text takes at an unhurried pace.

    Args:
        text: Any part of a text.
        before: The character before it; the parts' lengths then add up to that of the whole.
    """
    inside = [char.isalpha() for char in (before or " ") + text]
    return sum(map(_char_frames, text, inside))


@lru_cache(maxsize=4096)
def _char_frames(char: str, inside: bool) -> float:
    """Of a character, which may stand inside a word: behind a letter."""
    if char.isspace():
        return 0.5
    category = unicodedata.category(char)
    if category[0] == "N" or category == "Lu":
        return 5.0  # a digit is a word, and so may a capital be
    if category[0] == "P":
        return 3.0  # a pause
    if unicodedata.east_asian_width(char) in "WF" and category[0] == "L":
        return 3.0  # a syllable
    if category[0] in "LM":
        return 0.6 if inside else _WORD
    return 6.0  # a symbol is read by its name
