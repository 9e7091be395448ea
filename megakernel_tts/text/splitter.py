"""Long text -> pieces that are spoken one after the other.

A piece ends at the first good place once it is long enough: at a sentence end, later on at a
punctuation mark where a reader would breathe, later still at a space; never inside a number, an
abbreviation, a URL or a tag. What comes later never changes a cut, so that text may arrive in any
portions.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

_SENTENCE_ENDS = ".!?…。！？｡．।॥؟۔։።"
_WIDE_ENDS = "。！？｡．"  # no space follows these
_BREATHS = ",;:—–、，；：､،؛"
_WIDE_BREATHS = "、，；：､"
_CLOSERS = "\"'”’»)]}」』）】〉》"

_CLOSERS_ALONE = "”)]}」』）】〉》"  # never open anything
_CLOSING_GUILLEMETS = ("french", "italian", "spanish", "portuguese", "russian")  # »German«
_UNBROKEN = "\u00a0\u202f"  # spaces at which nothing is broken
_RECENT = 300  # characters before a border that are looked at; longer tags and URLs may be cut

# Words whose full stop ends no sentence, in lower case and without it.
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
_OF_ALL = frozenset[str]().union(*_ABBREVIATIONS_OF.values())
# Words that are abbreviations before a number alone.
_COUNTED = set("no vol fig sec pp p art abs nr núm pág pag min sek std".split())


@dataclass(frozen=True)
class Limits:
    """From which length a piece may end where; a wide (East Asian) character counts as three.

    Attributes:
        hard: At a sentence end.
        mid: At a mark where one breathes.
        weak: At a space.
        longest: Anywhere between two characters, but within a number, URL or tag only at twice
            this length, where everything ends.
    """

    hard: int = 200
    mid: int = 300
    weak: int = 400
    longest: int = 600


class Splitter:
    """Cuts a text that arrives in portions."""

    def __init__(self, language: str = "auto", limits: Limits | None = None) -> None:
        """Starts with an empty piece.

        Args:
            language: Whose abbreviations count; `auto` and unlisted ones: those of all languages.
            limits: Lengths of pieces.
        """
        self._limits = limits or Limits()
        self._german = language == "german"
        self._closing = _CLOSERS_ALONE + ("»" if language in _CLOSING_GUILLEMETS else "")
        self._closers = _CLOSERS + ("“«" if self._german else "")
        self._abbreviations = _ABBREVIATIONS_OF.get(language, _OF_ALL)
        self._piece: list[str] = []
        self._weight = 0

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """Takes more text.

        Yields:
            (portion, whether the piece ends after it); the portions add up to the text.
        """
        start = 0
        for i, char in enumerate(text):
            if self._weight >= self._limits.hard and self._cuts_before(char):
                yield text[start:i], True
                start, self._piece, self._weight = i, [], 0
            self._piece.append(char)
            self._weight += 3 if unicodedata.east_asian_width(char) in "WF" else 1
        if start < len(text):
            yield text[start:], False

    def _cuts_before(self, char: str) -> bool:
        limits, n = self._limits, self._weight
        last = self._piece[-1]
        if n >= 2 * limits.longest:
            return True
        if char.isspace() or char in self._closing or _joins(last, char):
            return False
        space = last.isspace() and last not in _UNBROKEN
        border = space or last in _WIDE_ENDS + _WIDE_BREATHS + _CLOSERS
        if not border and n < limits.longest:
            return False
        before = "".join(self._piece[-_RECENT:])
        if _in_tag(before):
            return False
        if not border:
            return not _in_word(before, char)
        if self._ends_sentence(before, char):
            return True
        if n >= limits.mid and _breathes(before, char):
            return True
        return n >= limits.weak and space and not _splits_number(before, char)

    def _ends_sentence(self, before: str, char: str) -> bool:
        text = before.rstrip()
        if "\n" in before[len(text) :].replace("\r\n", "\n").partition("\n")[2]:
            return True  # a blank line
        bare = text.rstrip(self._closers + " " + _UNBROKEN)
        if not bare or bare[-1] not in _SENTENCE_ENDS:
            return False
        if text == before:  # without a space only a wide mark ends a sentence
            joined = bare[-1] == "．" and char.isalnum()  # "３．５" is one number
            return bare[-1] in _WIDE_ENDS and char not in _SENTENCE_ENDS and not joined
        if bare[-1] not in ".…":
            return True
        return not char.islower() and not (bare[-1] == "." and self._abbreviates(bare, char))

    def _abbreviates(self, text: str, char: str) -> bool:
        """Whether the full stop at the end of the text belongs to its last word."""
        word = re.split(r"[\s(\[{\"'“‘«-]", text[:-1])[-1].lower()
        initial = len(word) == 1 and word.isalpha() and word != "i"
        ordinal = self._german and word.isdigit()
        acronym = bool(re.fullmatch(r"(?:[^\W\d_]\.)+[^\W\d_]", word))
        counted = word in _COUNTED and char.isdigit()
        return word in self._abbreviations or initial or ordinal or acronym or counted


def _breathes(before: str, char: str) -> bool:
    text = before.rstrip()
    bare = text.rstrip(_CLOSERS)
    if not bare or bare[-1] not in _BREATHS:
        return False
    if char.isdigit() and bare[:-1].rstrip()[-1:].isdigit():
        return False  # "3，000" is one number
    return text != before or bare[-1] in _WIDE_BREATHS


def _splits_number(before: str, char: str) -> bool:
    """Whether a space stands between the digits of one number, as in "1 000"."""
    return char.isdigit() and before.rstrip()[-1:].isdigit()


def _in_word(before: str, char: str) -> bool:
    """Whether a cut here would fall into a number or an address."""
    if char.isdigit() and re.search(r"\d[.,:/]?$", before):
        return True
    word = before.split()[-1]
    return any(mark in word for mark in ("://", "www.", "@"))


def _in_tag(before: str) -> bool:
    """Whether an opened `<tag ...` or `[tag ...` of ordinary length has not been closed yet."""
    return bool(re.search(r"(?:<[/\w][^<>]*|\[\w[^\[\]]*)$", before))


def _joins(last: str, char: str) -> bool:
    """Whether two characters make one on paper: marks, joiners, skin tones, flags, Hangul."""
    joiner, first_flag, last_flag = "\u200d", "\U0001f1e6", "\U0001f1ff"
    return (
        unicodedata.category(char).startswith("M")
        or joiner in (last, char)
        or "\U0001f3fb" <= char <= "\U0001f3ff"
        or (first_flag <= last <= last_flag and first_flag <= char <= last_flag)
        or "\u1160" <= char <= "\u11ff"
    )
