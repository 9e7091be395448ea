"""Splits long text into segments, each of which gets a prompt of its own.

A segment that is long enough ends at the next sentence end, a longer one at the next clause
punctuation, an even longer one at the next space. A segment never ends inside a number, an
abbreviation, a URL or a tag. Boundaries do not depend on later text or on how the text arrives.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

_SENTENCE_ENDS = ".!?…。！？｡．।॥؟۔։።"
_WIDE_SENTENCE_ENDS = "。！？｡．"  # not followed by a space
_CLAUSE_ENDS = ",;:—–、，；：､،؛"
_WIDE_CLAUSE_ENDS = "、，；：､"
_CLOSERS = "\"'”’»)]}」』）】〉》"

_UNAMBIGUOUS_CLOSERS = "”)]}」』）】〉》"  # never open a quotation or bracket
_CLOSING_GUILLEMETS = ("french", "italian", "spanish", "portuguese", "russian")  # »German«
_NO_BREAK_SPACES = "\u00a0\u202f"
_CONTEXT_CHARS = 300  # before a boundary that are examined; longer tags and URLs may be split

# Words after which a full stop does not end a sentence, in lower case without the stop.
_ABBREVIATIONS = {
    "english": "mr mrs ms dr prof sr jr st vs etc e.g i.e ph.d al approx dept "
    "est inc ltd co corp gov sen rep gen col capt lt sgt rev hon mt ave blvd rd "
    "jan feb mar apr jun jul aug sep sept oct nov dec",
    "german": "hr fr dr med prof dipl ing bzw z.b usw ca d.h u.a str s bd evtl ggf inkl "
    "jh mio mrd tel vgl jan feb apr aug sept okt nov dez",
    "french": "m mm mme mlle dr me st ste av bd p etc env ex cf",
    "spanish": "sr sra srta dr dra ud uds sto sta etc p.ej av ee uu",
    "italian": "sig sigg sig.ra dott prof ing avv ecc es",
    "portuguese": "sr sra dr dra prof etc av ex",
    "russian": "г гг ул д стр т.д т.п т.е т.к им руб тыс млн см проф акад",
}
_ABBREVIATIONS_OF = {name: frozenset(words.split()) for name, words in _ABBREVIATIONS.items()}
_ALL_ABBREVIATIONS = frozenset[str]().union(*_ABBREVIATIONS_OF.values())
# Words that are abbreviations only before a number.
_BEFORE_NUMBERS = set("no vol fig sec pp p art abs nr núm pág pag min sek std".split())


@dataclass(frozen=True)
class SplitLimits:
    """Lengths from which a segment may end; a wide (East Asian) character counts as three.

    Attributes:
        sentence: At a sentence end.
        clause: At clause punctuation.
        space: At a space.
        anywhere: Between any two characters outside numbers, URLs and tags. At twice this length a
            segment always ends.
    """

    sentence: int = 200
    clause: int = 300
    space: int = 400
    anywhere: int = 600


class Splitter:
    """Splits text that arrives in portions."""

    def __init__(self, language: str = "auto", limits: SplitLimits | None = None) -> None:
        """Starts with an empty segment.

        Args:
            language: Selects the abbreviations; `auto` and unlisted languages use all of them.
            limits: Lengths of segments.
        """
        self._limits = limits or SplitLimits()
        self._german = language == "german"
        self._closing = _UNAMBIGUOUS_CLOSERS + ("»" if language in _CLOSING_GUILLEMETS else "")
        self._closers = _CLOSERS + ("“«" if self._german else "")
        self._abbreviations = _ABBREVIATIONS_OF.get(language, _ALL_ABBREVIATIONS)
        self._segment: list[str] = []  # characters
        self._length = 0

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """Adds text.

        Yields:
            (portion, whether the segment ends after it). The portions concatenate to the text.
        """
        if text.isascii() and 0 < len(text) <= self._limits.sentence - self._length:
            self._segment += text  # most texts: in one operation, as the first audio waits for it
            self._length += len(text)
            yield text, False
            return
        start = 0
        for i, char in enumerate(text):
            if self._length >= self._limits.sentence and self._splits_before(char):
                yield text[start:i], True
                self.end_segment()
                start = i
            self._segment.append(char)
            self._length += 3 if unicodedata.east_asian_width(char) in "WF" else 1
        if start < len(text):
            yield text[start:], False

    def end_segment(self) -> None:
        """Ends the segment here, whatever its length."""
        self._segment, self._length = [], 0

    def _splits_before(self, char: str) -> bool:
        limits, length = self._limits, self._length
        last = self._segment[-1]
        if length >= 2 * limits.anywhere:
            return True
        if char.isspace() or char in self._closing or _combines(last, char):
            return False
        space = last.isspace() and last not in _NO_BREAK_SPACES
        boundary = space or last in _WIDE_SENTENCE_ENDS + _WIDE_CLAUSE_ENDS + _CLOSERS
        if not boundary and length < limits.anywhere:
            return False
        before = "".join(self._segment[-_CONTEXT_CHARS:])
        if _in_tag(before):
            return False
        if not boundary:
            return not _in_number_or_address(before, char)
        if self._ends_sentence(before, char):
            return True
        if length >= limits.clause and _ends_clause(before, char):
            return True
        return length >= limits.space and space and not _splits_number(before, char)

    def _ends_sentence(self, before: str, char: str) -> bool:
        text = before.rstrip()
        if "\n" in before[len(text) :].replace("\r\n", "\n").partition("\n")[2]:
            return True  # a blank line
        bare = text.rstrip(self._closers + " " + _NO_BREAK_SPACES)
        if not bare or bare[-1] not in _SENTENCE_ENDS:
            return False
        if text == before:  # without a space only wide punctuation ends a sentence
            in_number = bare[-1] == "．" and char.isalnum()  # "３．５" is one number
            return bare[-1] in _WIDE_SENTENCE_ENDS and char not in _SENTENCE_ENDS and not in_number
        if bare[-1] not in ".…":
            return True
        return not char.islower() and not (bare[-1] == "." and self._abbreviates(bare, char))

    def _abbreviates(self, text: str, char: str) -> bool:
        """Whether the full stop at the end of the text is part of an abbreviation or ordinal."""
        word = re.split(r"[\s(\[{\"'“‘«-]", text[:-1])[-1].lower()
        initial = len(word) == 1 and word.isalpha() and word != "i"
        ordinal = self._german and word.isdigit()
        acronym = bool(re.fullmatch(r"(?:[^\W\d_]\.)+[^\W\d_]", word))
        numbered = word in _BEFORE_NUMBERS and char.isdigit()
        return word in self._abbreviations or initial or ordinal or acronym or numbered


def _ends_clause(before: str, char: str) -> bool:
    text = before.rstrip()
    bare = text.rstrip(_CLOSERS)
    if not bare or bare[-1] not in _CLAUSE_ENDS:
        return False
    if char.isdigit() and bare[:-1].rstrip()[-1:].isdigit():
        return False  # "3，000" is one number
    return text != before or bare[-1] in _WIDE_CLAUSE_ENDS


def _splits_number(before: str, char: str) -> bool:
    """Whether the boundary is a space between digits of one number, as in "1 000"."""
    return char.isdigit() and before.rstrip()[-1:].isdigit()


def _in_number_or_address(before: str, char: str) -> bool:
    if char.isdigit() and re.search(r"\d[.,:/]?$", before):
        return True
    word = before.split()[-1]
    return any(mark in word for mark in ("://", "www.", "@"))


def _in_tag(before: str) -> bool:
    """Whether `before` ends inside a `<tag ...>` or `[tag ...]`."""
    return bool(re.search(r"(?:<[/\w][^<>]*|\[\w[^\[\]]*)$", before))


def _combines(last: str, char: str) -> bool:
    """Whether two characters are one grapheme: marks, joiners, skin tones, flags, Hangul."""
    joiner, first_flag, last_flag = "\u200d", "\U0001f1e6", "\U0001f1ff"
    return (
        unicodedata.category(char).startswith("M")
        or joiner in (last, char)
        or "\U0001f3fb" <= char <= "\U0001f3ff"
        or (first_flag <= last <= last_flag and first_flag <= char <= last_flag)
        or "\u1160" <= char <= "\u11ff"
    )
