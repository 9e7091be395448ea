"""The form of tags in text: elements of SSML (`<break time="1s"/>`) and phonemes (`<<m|ɛ|t>>`).

Names are not checked, so that no protocol's tag is spoken. A `<` that begins no tag is text.
"""

import re
from typing import Literal, NamedTuple

from megakernel_tts.text.scripts import within_word

MAX_TAG_CHARACTERS = 256  # a longer one is text
MAX_BREAK_S = 10.0  # a longer break lasts as long

_MARKS = ".,;:!?…"  # a word that follows one without a space, but with a tag, is a new word
_DEFAULT_BREAK_S = 0.5  # of a break without a time that can be read

_NAME = r"[A-Za-z][\w:.-]*"
_ATTRIBUTE = rf"""\s+{_NAME}\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s"'<>/]+)"""
_INCOMPLETE_ATTRIBUTE = rf"""\s+(?:{_NAME}\s*(?:=\s*(?:"[^"<>]*|'[^'<>]*)?)?)?"""

# Patterns of a tag, and of what may become one with more text.
TAG = rf"(?:</?{_NAME}(?:{_ATTRIBUTE})*\s*/?>|<[?!][A-Za-z-][^<>]*>|<<[^\s<>]+>>)"
TAG_START = (
    rf"(?:</?(?:{_NAME}(?:{_ATTRIBUTE})*(?:{_INCOMPLETE_ATTRIBUTE}|\s*/)?)?"
    r"|<[?!](?:[A-Za-z-][^<>]*)?|<<(?:[^\s<>]+>?)?)\Z"
)

_TAG = re.compile(TAG)
_TAG_START = re.compile(TAG_START)
_TAG_NAME = re.compile(rf"<(/?)({_NAME})")
_TIME = re.compile(r"""\stime\s*=\s*\W?(\d+\.?\d*|\.\d+)\s*(ms|s)\b""", re.IGNORECASE)

TagKind = Literal["break", "spell", "end of spell", "other"]


class Tag(NamedTuple):
    """A tag of a text.

    Attributes:
        text: The tag.
        kind: What it does; every other tag does nothing.
        separates: Whether a word does not continue behind it.
    """

    text: str
    kind: TagKind
    separates: bool

    def divides_words(self, before: str, after: str) -> bool:
        """Whether the characters around the tag belong to different words.

        Args:
            before: The last character before it that is in no tag, or "".
            after: The first one behind it.
        """
        if self.separates and within_word(before, after):
            return True
        return after.isalnum() and before != "" and before in _MARKS

    @property
    def seconds(self) -> float:
        """Duration of a break, at most `MAX_BREAK_S`."""
        time = _TIME.search(self.text)
        if time is None:
            return _DEFAULT_BREAK_S
        return min(float(time[1]) / (1000 if time[2].lower() == "ms" else 1), MAX_BREAK_S)


def read_tag(text: str, start: int) -> Tag | Literal["incomplete"] | None:
    """Reads the tag at a `<`.

    Args:
        text: A text; more may follow.
        start: Index of the `<`.

    Returns:
        The tag; None if there is none. `incomplete` if that depends on text behind `text`.
    """
    end = start + MAX_TAG_CHARACTERS
    if (match := _TAG.match(text, start, end)) is not None:
        return _tag(match[0])
    undecided = len(text) < end and _TAG_START.match(text, start)
    return "incomplete" if undecided else None


def _tag(text: str) -> Tag:
    match = _TAG_NAME.match(text)
    closing, name = (match[1], match[2].lower()) if match is not None else ("", "")
    if name == "break" and not closing:
        return Tag(text, "break", separates=True)
    if name == "spell":
        return Tag(text, "end of spell" if closing else "spell", separates=True)
    return Tag(text, "other", separates=text.endswith(("/>", ">>")))
