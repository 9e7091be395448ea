"""Random English: a template grammar over word lists, and lists of further words.

Sentences need not be meaningful; they must contain every kind of word, number and pause that a
voice agent says, in ordinary contexts.
"""

import random
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from examples.train_voice.numerals import spell

HERE = Path(__file__).parent
_DIGITS = "zero one two three four five six seven eight nine".split()
_IRREGULAR = {
    "man": "men", "woman": "women", "child": "children", "person": "people", "foot": "feet",
    "tooth": "teeth", "mouse": "mice", "life": "lives", "wife": "wives", "knife": "knives",
    "leaf": "leaves", "shelf": "shelves", "sheep": "sheep", "fish": "fish", "news": "news",
    "information": "information", "people": "people", "music": "music", "homework": "homework",
}  # fmt: skip
_FORMS = {
    "transitive": ("make", "made", "making", "makes"),
    "intransitive": ("go", "went", "going", "goes"),
}


def lines_of(file: str) -> list[str]:
    """Lines of a text file in this module's folder."""
    return (HERE / file).read_text(encoding="utf-8").splitlines()


def plural(noun: str) -> str:
    """Forms the plural of a noun."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if re.search(r"(s|x|z|ch|sh)$", noun):
        return noun + "es"
    if re.search(r"[^aeiou]y$", noun):
        return noun[:-1] + "ies"
    return noun + "s"


def articles(text: str) -> str:
    """Replaces `a` before a vowel by `an`."""

    def fix(match: re.Match[str]) -> str:
        word = match[2]
        consonant = word.startswith(("use", "uni", "euro", "one", "US", "UK"))
        vowel = word[0] in "aeiouAEIOU" and not consonant
        return f"{match[1]}n {word}" if vowel or word.startswith(("hour", "hon")) else match[0]

    return re.sub(r"\b([Aa]) (\w+)", fix, text)


def _sentence(text: str) -> str:
    text = articles(text)
    return text[0].upper() + text[1:]


class Grammar:
    """Generates utterances of one to three sentences, determined by the seed."""

    def __init__(self, words: Sequence[str], seed: int) -> None:
        """Reads the word lists and the templates.

        Args:
            words: A word list with capitalised names, for words that no template contains.
            seed: Seed of all choices.
        """
        self._random = random.Random(seed)
        self._rare = [w for w in words if w.islower()]
        self._proper = [w for w in words if w.istitle()]
        lists = tomllib.loads((HERE / "words.toml").read_text(encoding="utf-8"))
        self._words = {name: text.split() for name, text in lists.items()}
        templates = tomllib.loads((HERE / "templates.toml").read_text(encoding="utf-8"))
        self._templates = {name: text.strip().splitlines() for name, text in templates.items()}
        self._replies = lines_of("replies.txt")
        self._common = sorted({*" ".join(lists.values()).replace("/", " ").split()})
        self._numbers: dict[str, Callable[[], str]] = {
            "count": self._count, "clock": self._clock, "price": self._price,
            "digits": self._digits, "year": self._year,
            "small": lambda: spell(self._random.randint(0, 40)),
            "digit": lambda: self._either(self._random.randint(0, 9)),
            "number": lambda: self._either(self._random.randint(1, 400)),
            "dayofmonth": lambda: self._either(self._random.randint(1, 31)),
        }  # fmt: skip

    def utterance(self) -> str:
        """Generates one to three sentences, or a few words."""
        r = self._random.random()
        if r < 0.04:
            return self._random.choice(self._replies)
        if r < 0.09:
            return self._list(self._common, 1, 3)
        if r < 0.15:
            return self._list(self._common, 3, 9)
        if r < 0.22:
            return self._list(self._rare, 1, 6)
        if r < 0.33:
            return self._of("drill")
        sentences = 1 if r < 0.78 else 2 if r < 0.95 else 3
        return " ".join(self._one() for _ in range(sentences))

    def _one(self) -> str:
        r = self._random.random()
        if r < 0.08:
            return self._random.choice(self._replies)
        if r < 0.34:
            return self._of("clause") + self._random.choice("......!")
        if r < 0.46:
            return self._of("compound") + "."
        return self._of("question") if r < 0.58 else self._of("agent")

    def _of(self, name: str) -> str:
        return _sentence(self._expand(f"{{{name}}}"))

    def _expand(self, template: str) -> str:
        return re.sub(r"\{(\w+)\}(s?)", self._fill, template)

    def _fill(self, match: re.Match[str]) -> str:
        name, choose = match[1], self._random.choice
        if name in self._templates:
            return self._expand(choose(self._templates[name])) + match[2]
        if name in self._numbers:
            return self._numbers[name]()
        for verbs, forms in _FORMS.items():
            if name in forms:
                return choose(self._words[verbs]).split("/")[forms.index(name)]
        if name in ("rare", "proper"):
            return choose(self._rare if name == "rare" else self._proper)
        word = choose(self._words[name])
        return plural(word) if match[2] else word

    def _list(self, pool: Sequence[str], min_words: int, max_words: int) -> str:
        words = [
            self._random.choice(pool) for _ in range(self._random.randint(min_words, max_words))
        ]
        text = (", " if self._random.random() < 0.4 else " ").join(words)
        return text[0].upper() + text[1:] + ("." if self._random.random() < 0.85 else "")

    def _either(self, n: int) -> str:
        return str(n) if self._random.random() < 0.4 else spell(n)

    def _count(self) -> str:
        top = self._random.choice((12, 12, 100, 100, 1000, 20_000))
        return self._either(self._random.randint(2, top))

    def _clock(self) -> str:
        choose = self._random.choice
        hour, minute = self._random.randint(1, 12), self._random.choice(range(0, 60, 5))
        words = spell(minute) if minute > 9 else "oh five" if minute else "o'clock"
        return choose(
            (
                f"{hour}:{minute:02d}" if minute else f"{hour} o'clock",
                f"{hour}:{self._random.randint(10, 59)}",
                f"{spell(hour)} {words}",
                f"{spell(hour)} {words}",
                f"half past {spell(hour)}",
                f"a quarter past {spell(hour)}",
                f"a quarter to {spell(hour)}",
                f"{spell(hour)} in the {choose(('morning', 'afternoon', 'evening'))}",
                f"{self._either(hour)} {choose(('AM', 'PM'))}",
            )
        )

    def _price(self) -> str:
        dollars, cents = self._random.randint(1, 400), self._random.randint(1, 99)
        return self._random.choice(
            (f"${dollars}", f"${dollars}.{cents:02d}", f"{spell(dollars)} dollars",
             f"{spell(dollars)} dollars and {spell(cents)} cents", f"{spell(cents)} cents")
        )  # fmt: skip

    def _digits(self) -> str:
        digits = [self._random.randint(0, 9) for _ in range(self._random.randint(3, 7))]
        written = [str(d) if self._random.random() < 0.5 else _DIGITS[d] for d in digits]
        same = [_DIGITS[d] for d in digits] if self._random.random() < 0.5 else written
        return self._random.choice((" ", " ", ", ")).join(same)

    def _year(self) -> str:
        return str(self._random.randint(self._random.choice((1900, 1990)), 2030))
