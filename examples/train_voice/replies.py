"""Replies as language models write them, from templates in one language, determined by a seed."""

import random
import re
import tomllib

from examples.train_voice.grammar import HERE, articles, plural
from examples.train_voice.slots import Slots

_FILES = {
    "english": ("assistant.toml", ("words.toml", "assistant_words.toml")),
    "spanish": ("spanish.toml", ("spanish_words.toml",)),
}
_INTRODUCTION = re.compile(
    r"((?:Well|To be honest|Actually|Unfortunately|Okay, so|As of \w+ \w+|According to [^,.]+|"
    r"En realidad|Por desgracia)(?:,|\.\.\.)|In short:|La verdad es que) (\w+)"
)


class Replies:
    """Generates replies of one to four sentences."""

    def __init__(self, language: str, seed: int) -> None:
        """Reads the templates and word lists.

        Args:
            language: `english` or `spanish`.
            seed: Seed of all choices.
        """
        self._rng = random.Random(seed)
        file, lists = _FILES[language]
        templates = tomllib.loads((HERE / file).read_text(encoding="utf-8"))
        self._templates = {name: text.strip().splitlines() for name, text in templates.items()}
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
        text = re.sub(r"(?<![ap]\.m\.)(?<=[.!?]) [a-z]", lambda m: m[0].upper(), text)
        if self._english:
            text = articles(text)
        text = _INTRODUCTION.sub(self._continue, text)
        text = text.replace(":.", ".").replace("?.", "?").replace("!.", "!")
        text = re.sub(r"(?<!\.)\.\.(?!\.)", ".", text)
        return text[0].upper() + text[1:]

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
            return self._expand(self._slots[name]()) + ending
        word = self._rng.choice(self._words[name]).replace("_", " ")
        return plural(word) if ending else word
