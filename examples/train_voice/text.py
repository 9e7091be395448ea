"""Writes the corpus: texts in English and Spanish, each with the voice that speaks it.

python -m examples.train_voice.text WORK --texts 180000
"""

import argparse
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tqdm import tqdm

from examples.train_voice import sources
from examples.train_voice.grammar import Grammar, articles, lines_of
from examples.train_voice.layout import Work, summary
from examples.train_voice.phonemes import VOICES
from examples.train_voice.replies import Replies

_MAX_CHARS = 360
_MAX_WORDS = 62
_SPANISH_SHARE = 0.25
_SHARES = {  # of the texts of a language
    "english": {
        "replies": 38, "notation": 13, "grammar": 12, "novels": 8, "verses": 6, "examples": 17,
        "words": 6,
    },
    "spanish": {"replies": 52, "notation": 14, "verses": 19, "words": 15},
}  # fmt: skip
_VOICE_SHARES = {"clara": 0.39, "henry": 0.37, "olivia": 0.24, "lucia": 1.0}
_FORBIDDEN = re.compile(r"[^\x20-\x7e‘’“”—–…°€£¥áéíóúüñÁÉÍÓÚÜÑ¿¡ºª«»≈×÷]")
_ENGLISH_WORDS = "share/dict/american-english-small"
_UNSUITABLE = re.compile(r"\b(fuck|shit|cunt|nigger|faggot|whore|rape|slut)", re.IGNORECASE)


def held_out() -> list[tuple[str, str]]:
    """Category and text of the sentences for evaluation only."""
    return [(c, t) for c, t in (line.split("\t") for line in lines_of("held_out.txt"))]


def held_out_corpus() -> list[tuple[str, str]]:
    """Voice and text of the held-out sentences; the voices of a language alternate."""
    sentences = held_out()
    corpus: list[tuple[str, str]] = []
    for i, (category, text) in enumerate(sentences):
        language = language_of(category)
        voices = [v for v in VOICES if VOICES[v].language == language]
        corpus.append((voices[i % len(voices)], text))
    return corpus


def read_words(file: Path) -> list[str]:
    """Words of a word list that consist of letters; names are capitalised."""
    words = file.read_text(encoding="utf-8").split()
    return [w for w in words if len(w) > 1 and w.isalpha()]


def language_of(category: str) -> str:
    """Language of a category of held-out sentences."""
    return "spanish" if category.startswith("spanish") else "english"


class Sources:
    """Endless texts of each kind in one language, in an order determined by the seed."""

    def __init__(self, language: str, seed: int, root: Path) -> None:
        """Opens the texts.

        Args:
            language: `english` or `spanish`.
            seed: Seed of all choices.
            root: Folder of the Debian packages' files.
        """
        self._rng, self._root, self._language = random.Random(seed), root, language
        self._grammar: Grammar | None = None
        if language == "english":
            self._words = read_words(root / _ENGLISH_WORDS)
            self._grammar = Grammar([w for w in self._words if w.isascii()], seed)
        else:
            verses = " ".join(sources.verses(language, root))
            self._words = sorted(set(re.findall(r"[^\W\d_]{3,}", verses)))
        self._names = [w for w in self._words if w.istitle()]
        self._replies = Replies(language, seed)
        self._pools: dict[str, Iterator[str]] = {}

    def text(self, kind: str) -> str:
        """A text of a kind, which is a name in `_SHARES`."""
        if kind == "replies":
            return self._replies.reply()
        if kind == "notation":
            return self._replies.notation()
        if kind == "grammar":
            assert self._grammar is not None
            return self._grammar.utterance()
        if kind == "words":
            return self._list()
        if kind not in self._pools:
            self._pools[kind] = iter(self._pool(kind))
        return next(self._pools[kind])

    def _pool(self, kind: str) -> list[str]:
        makers: dict[str, Callable[[], Iterator[str]]] = {
            "novels": lambda: self._prose(sources.novels(self._root)),
            "verses": lambda: self._prose(sources.verses(self._language, self._root)),
            "examples": self._definitions,
        }
        texts = list(dict.fromkeys(makers[kind]()))
        self._rng.shuffle(texts)
        return texts

    def _prose(self, paragraphs: Iterator[str]) -> Iterator[str]:
        """Single sentences, and now and then a few that follow each other."""
        for paragraph in paragraphs:
            found = sources.sentences(paragraph)
            at = 0
            while at < len(found):
                count = self._rng.choice((1, 1, 1, 2, 3))
                text = _balanced(" ".join(found[at : at + count]))
                at += count
                if not re.search(r"[A-Z]{2}", text):  # emphasis
                    yield text

    def _definitions(self) -> Iterator[str]:
        for part, word, text in sources.definitions(self._root):
            if part == "example" and len(text.split()) > 2:
                yield text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")
            elif part != "example" and self._rng.random() < 0.15 and "(" not in text:
                yield self._define(part, word, text)

    def _define(self, part: str, word: str, text: str) -> str:
        text = text.split(";")[0].rstrip(". ")
        if part == "noun" and word.islower():
            return articles(f"A {word} is {text}.")
        if part == "verb":
            return f"To {word} means to {text}."
        return f'"{word[0].upper()}{word[1:]}" means {text}.'

    def _list(self) -> str:
        pool = self._names if self._names and self._rng.random() < 0.25 else self._words
        words = self._rng.choices(pool, k=self._rng.randint(1, 7))
        text = self._rng.choice((" ", ", ", ", ")).join(words)
        return text[0].upper() + text[1:] + self._rng.choice(("", ".", ".", ".", "?", "!"))


def _balanced(text: str) -> str:
    """Without a quotation mark that has no partner."""
    if text.count('"') % 2:
        text = text.replace('"', "")
    if text.count("“") != text.count("”"):
        text = re.sub("[“”]", "", text)
    if text.count("(") != text.count(")"):
        text = re.sub("[()]", "", text)
    return text


def is_suitable(text: str) -> bool:
    """Whether a text has a length and characters that the voice learns."""
    words = text.split(" ")
    short = 0 < len(text) <= _MAX_CHARS and len(words) <= _MAX_WORDS
    readable = not _FORBIDDEN.search(text) and not _UNSUITABLE.search(text)
    return short and all(words) and readable and len(max(words, key=len)) < 45


def make_corpus(texts: int, seed: int, root: Path = sources.DEBIAN) -> list[tuple[str, str]]:
    """Generates texts without repeated long ones and without held-out sentences.

    Returns:
        Voice and text, shuffled.
    """
    rng = random.Random(seed)
    corpus: list[tuple[str, str]] = []
    counts = {"spanish": round(texts * _SPANISH_SHARE)}
    counts["english"] = texts - counts["spanish"]
    for language, count in counts.items():
        pool = Sources(language, seed, root)
        voices = [v for v in VOICES if VOICES[v].language == language]
        weights = [_VOICE_SHARES[v] for v in voices]
        kinds, shares = zip(*_SHARES[language].items(), strict=True)
        seen: set[str] = set()
        with tqdm(total=count, desc=language, disable=None) as progress:
            while len(seen) < count:
                text = " ".join(pool.text(rng.choices(kinds, shares)[0]).split())
                if text in seen or not is_suitable(text) or contains_held_out(text):
                    continue
                seen.add(text)
                corpus.append((rng.choices(voices, weights)[0], text))
                progress.update()
    rng.shuffle(corpus)
    return corpus


@cache
def _held_out_texts() -> tuple[frozenset[str], list[str]]:
    """All held-out texts in lower case, and those that are long enough to be unusual."""
    texts = [text.lower() for _, text in held_out()]
    return frozenset(texts), [text for text in texts if len(text.split()) > 3]


def contains_held_out(text: str) -> bool:
    """Whether a text is a held-out sentence, or contains one of more than three words."""
    whole, long = _held_out_texts()
    lower = text.lower()
    return lower in whole or any(one in lower for one in long)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder")
    parser.add_argument("--texts", type=int, default=180_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--root", type=Path, default=sources.DEBIAN, help="folder of the Debian packages' files"
    )
    options = parser.parse_args()
    work = Work(options.work)
    work.folder.mkdir(parents=True, exist_ok=True)
    corpus = make_corpus(options.texts, options.seed, options.root)
    work.write_corpus(corpus)
    print(f"{len(corpus)} texts, {sum(len(text) for _, text in corpus)} characters")


if __name__ == "__main__":
    main()
