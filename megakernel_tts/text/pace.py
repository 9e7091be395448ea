"""Estimates the duration of spoken text at an ordinary pace."""

import unicodedata
from functools import lru_cache

# Frames per character.
_SPACE = 0.5
_FIRST_LETTER = 3.0  # of a word, which may have only one
_LETTER = 0.6
_DIGIT_OR_CAPITAL = 5.0  # a digit is spoken as a word; a capital may be
_PUNCTUATION = 3.0  # a pause
_SYLLABLE = 3.0  # an East Asian character
_SYMBOL = 6.0  # is spoken by its name


def ordinary_frames(text: str, before: str = "") -> float:
    """Estimates the number of 80 ms frames of a text at an unhurried pace.

    Args:
        text: Any part of a text.
        before: The character before it. With it, the estimates of parts add up to the whole's.
    """
    follows_letter = [char.isalpha() for char in (before or " ") + text]
    return sum(map(_char_frames, text, follows_letter))


@lru_cache(maxsize=4096)
def _char_frames(char: str, follows_letter: bool) -> float:
    if char.isspace():
        return _SPACE
    category = unicodedata.category(char)
    if category[0] == "N" or category == "Lu":
        return _DIGIT_OR_CAPITAL
    if category[0] == "P":
        return _PUNCTUATION
    if unicodedata.east_asian_width(char) in "WF" and category[0] == "L":
        return _SYLLABLE
    if category[0] in "LM":
        return _LETTER if follows_letter else _FIRST_LETTER
    return _SYMBOL
