"""Replies as language models write them, from templates in one language, determined by a seed."""

import random
import re
import tomllib

from examples.train_voice.grammar import HERE, articles, plural
from examples.train_voice.slots import Slots

_FILES = {
    "english": (("assistant.toml", "notation.toml"), ("words.toml", "assistant_words.toml")),
    "spanish": (("spanish.toml",), ("spanish_words.toml",)),
}
_INTRODUCTION = re.compile(
    r"((?:Well|To be honest|Actually|Unfortunately|Okay, so|As of \w+ \w+|According to [^,.]+|"
    r"En realidad|Por desgracia)(?:,|\.\.\.)|In short:|La verdad es que) (\w+)"
)
_SENTENCE_START = re.compile(r"(?<!\.\w\.)(?<!etc\.)(?<=[.!?]) [a-z]")  # but for e.g. and the like


class Replies:
    """Generates replies of one to four sentences."""

    def __init__(self, language: str, seed: int) -> None:
        """Reads the templates and word lists.

        Args:
            language: `english` or `spanish`.
            seed: Seed of all choices.
        """
        self._rng = random.Random(seed)
        files, lists = _FILES[language]
        self._templates: dict[str, list[str]] = {}
        for file in files:
            templates = tomllib.loads((HERE / file).read_text(encoding="utf-8"))
            self._templates |= {n: text.strip().splitlines() for n, text in templates.items()}
        self._words: dict[str, list[str]] = {}
        for one in lists:
            words = tomllib.loads((HERE / one).read_text(encoding="utf-8"))
            self._words |= {n: text.replace("/", " ").split() for n, text in words.items()}
        self._slots = Slots(self._rng, language).makers
        self._names = {w for n in ("first", "last", "place") for w in self._words[n]}
        self._english = language == "english"

    def reply(self) -> str:
        """Generates a reply."""
        text = self._expand("{reply}")
        text = _SENTENCE_START.sub(lambda m: m[0].upper(), text)
        return self._corrected(text)

    def notation(self) -> str:
        """Generates one or two sentences with numbers, addresses, abbreviations or names."""
        count = self._rng.choice((1, 1, 1, 1, 2))
        return " ".join(self._corrected(self._expand("{notation}")) for _ in range(count))

    def _corrected(self, text: str) -> str:
        """A text that begins with a capital, with the right articles and single full stops."""
        if self._english:
            text = articles(text)
        text = _INTRODUCTION.sub(self._continue, text)
        text = text.replace(":.", ".").replace("?.", "?").replace("!.", "!")
        text = re.sub(r"(?<!\.)\.\.(?!\.)", ".", text)
        is_address = re.match(r"\S+[@.]\w", text)
        return text if is_address else text[0].upper() + text[1:]

    def _continue(self, match: re.Match[str]) -> str:
        """A sentence after an introduction starts in lower case, unless with a name."""
        word = match[2]
        if word in self._names or word in ("I", "Mr", "Mrs", "Ms", "Dr", "Prof", "NASA"):
            return match[0]
        return f"{match[1]} {word[0].lower()}{word[1:]}"

    def _expand(self, template: str) -> str:
        return re.sub(r"\{(\w+)\}(s?)", self._fill, template)

    def _fill(self, match: re.Match[str]) -> str:
        name, ending = match.groups()
        if name in self._templates:
            return self._expand(self._rng.choice(self._templates[name])) + ending
        if name in self._slots:
            text = self._expand(self._slots[name]())
            return (text.lower().replace("'", "") if name == "email" else text) + ending
        word = self._rng.choice(self._words[name]).replace("_", " ")
        return plural(word) if ending else word
