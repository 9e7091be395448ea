"""Characters of words, in scripts with and without spaces between words."""

import re
import unicodedata

# Kana and Han, which are written without spaces, as the content of a character class.
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"

_UNSPACED = re.compile(f"[{UNSPACED}]")


def within_word(before: str, after: str) -> bool:
    """Whether two adjacent characters belong to one word.

    Args:
        before: A character, or "" at the start of a text.
        after: The character behind it, or "" at the end.
    """
    if after and unicodedata.category(after)[0] == "M":
        return bool(before)
    joined = _is_letter(before) and _is_letter(after)
    return joined and not (_UNSPACED.match(before) or _UNSPACED.match(after))


def _is_letter(char: str) -> bool:
    return char.isalnum() or char == "_" or (bool(char) and unicodedata.category(char)[0] == "M")
