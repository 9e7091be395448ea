"""Phonemes of the teacher's alphabet for spoken words, with the span of each written word.

English goes through misaki, with which the teacher was trained, and a part-of-speech tagger of
spaCy; words that misaki does not know, and Spanish, through espeak-ng. These packages make training
data only. espeak-ng keeps global state: use one `Phonemizer` for each language and process.
"""

# pyright: reportMissingImports=false

import importlib.util
import logging
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

from examples.train_voice.phonemes import PUNCTUATION
from examples.train_voice.symbols import SPELLED

_KNOWN = PUNCTUATION | set(
    "AIOQSTWYabdefhijklmnoprstuvwxz ʣʥʦʨᵝꭧᵊɑɐɒæβɔɕçɖðʤəɚɛɜɟɡɥɨɪʝɯɰŋɳɲɴøɸθœɹɾɻʁɽʂʃʈʧʊʋʌɣɤχʎʒʔᵻ"
    "ˈˌː\u0303"
)
_LETTERS = dict(
    zip(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        "ˈA bˈi sˈi dˈi ˈi ˈɛf ʤˈi ˈAʧ ˈI ʤˈA kˈA ˈɛl ˈɛm ˈɛn ˈO pˈi kjˈu ˈɑɹ ˈɛs tˈi jˈu vˈi "
        "dˈʌbəlju ˈɛks wˈI zˈi".split(),
        strict=True,
    )
)
_BRITISH_LETTERS = {"O": "ˈQ", "R": "ˈɑː", "Z": "zˈɛd"}
_PLACE_OF_LETTER = "bee"  # said in a letter's place, so that its neighbours are read in context
_ESPEAK_SPANISH = (
    ("a^ɪ", "I"), ("a^ʊ", "W"), ("d^ʒ", "ʤ"), ("e^ɪ", "A"), ("o^ʊ", "O"), ("t^ʃ", "ʧ"), ("^", ""),
    ("-", ""),
)  # fmt: skip


class Phonemizer:
    """Text to phonemes in one accent."""

    def __init__(self, accent: str, tagger: Path | None = None) -> None:
        """Loads the packages.

        Args:
            accent: `us`, `gb` or `es`.
            tagger: Wheel of the spaCy model; without it words with two pronunciations are guessed.

        Raises:
            ImportError: One of the packages is not installed.
        """
        import espeakng_loader
        from phonemizer.backend import EspeakBackend
        from phonemizer.backend.espeak.wrapper import EspeakWrapper

        EspeakWrapper.set_library(espeakng_loader.get_library_path())
        EspeakWrapper.set_data_path(espeakng_loader.get_data_path())
        self._accent = accent
        if accent == "es":
            logger = logging.getLogger("examples.train_voice.espeak")
            logger.setLevel(logging.ERROR)
            self._espeak = EspeakBackend(
                "es", preserve_punctuation=True, with_stress=True, tie="^", logger=logger
            )
            self._memory: dict[str, str] = {}
        else:
            self._misaki = _misaki(accent == "gb", tagger)
            british = _BRITISH_LETTERS if accent == "gb" else {}
            table = _LETTERS | british
            self._letters = {
                k: v.replace("i", "iː").replace("u", "uː") if british else v
                for k, v in table.items()
            }

    def __call__(self, words: list[list[str]]) -> list[str]:
        """Phonemes of each written word; empty for one that is not spoken.

        Args:
            words: Spoken words of each written word, as `spoken_words` gives them.
        """
        said = [one for group in words for one in group]
        sounds = iter(self._spanish(said) if self._accent == "es" else self._english(said))
        return [" ".join(filter(None, (_clean(next(sounds), w) for w in group))) for group in words]

    def _english(self, said: list[str]) -> list[str]:
        plain = [re.sub(rf"{SPELLED}\w+", _PLACE_OF_LETTER, one) for one in said]
        plain = [one.replace("’", "'").replace("‘", "'") for one in plain]
        sounds = self._read(plain)
        if len(sounds) != len(said):  # a word was divided: read each on its own
            sounds = ["".join(self._read([one])) for one in plain]
        return [
            self._letter(one, sound) if SPELLED in one else sound
            for one, sound in zip(said, sounds, strict=True)
        ]

    def _read(self, said: list[str]) -> list[str]:
        """Phonemes of each word, read in the sentence's context."""
        _, tokens = self._misaki(" ".join(said), preprocess=False)
        sounds: list[str] = []
        current = text = ""
        for token in tokens:
            current += token.phonemes or ""
            text += token.text
            if token.whitespace:
                sounds.append(current)
                current = text = ""
        return [*sounds, current] if text else sounds

    def _letter(self, said: str, sound: str) -> str:
        match = re.fullmatch(rf"(\W*){SPELLED}(\w)([\w']*)(.*)", said)
        if match is None:
            return sound
        before, letter, ending, after = match.groups()
        name = self._letters[letter]
        if ending:
            name += "ᵻz" if name[-1] in "sʃʧzʤ" else "s" if name[-1] in "fkpt" else "z"
        marks = [c for c in before + "\0" + after if c in PUNCTUATION or c == "\0"]
        return "".join(marks).replace("\0", name)

    def _spanish(self, said: list[str]) -> list[str]:
        """Phonemes of each word; joined words are divided where espeak joins them."""
        if not said:
            return []
        together = self._espeak.phonemize([" ".join(said)], strip=True)[0].split(" ")
        if len(together) != len(said):
            together = [self._phonemes_of(one) for one in said]
        for old, new in _ESPEAK_SPANISH:
            together = [sound.replace(old, new) for sound in together]
        return together

    def _phonemes_of(self, word: str) -> str:
        if word not in self._memory:
            found = self._espeak.phonemize([word], strip=True)
            self._memory[word] = found[0].replace(" ", "") if found else ""
        return self._memory[word]


def _clean(sound: str, said: str) -> str:
    """Phonemes that the teacher knows, with the punctuation mark that ends the word."""
    sound = "".join(c for c in sound if c in _KNOWN).strip()
    if sound and said[-1] in ".,;:!?…" and sound[-1] not in PUNCTUATION:
        sound += said[-1]
    return sound


def _misaki(british: bool, tagger: Path | None) -> Any:
    """misaki's English front end without its default tagger, which downloads a model."""
    import spacy
    from misaki import en, espeak

    front = en.G2P.__new__(en.G2P)
    front.version, front.british, front.unk = None, british, ""
    front.lexicon = en.Lexicon(british)
    front.fallback = espeak.EspeakFallback(british)
    if tagger is None:
        blank = spacy.blank("en")
        front.nlp = lambda text: _guess_tags(blank(text))
    else:
        front.nlp = spacy.load(unpacked(tagger), enable=["tok2vec", "tagger"])
    return front


def unpacked(wheel: Path) -> Path:
    """Folder of the spaCy model in a wheel, which is unpacked beside it."""
    folder = wheel.with_suffix("")
    if not folder.exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return next(folder.rglob("config.cfg")).parent


_AFTER_VERBS = frozenset(
    "to will would can could should must may might do does did don't doesn't didn't won't can't "
    "i you we they let's please".split()
)


def _guess_tags(document: Any) -> Any:
    """Tags for the words that misaki's rules distinguish."""
    marks = {",": ",", ".": ".", "?": ".", "!": ".", "(": "-LRB-", ")": "-RRB-", '"': "''"}
    for i, token in enumerate(document):
        word, before = token.lower_, document[i - 1].lower_ if i else ""
        if word in ("-", "–", "_", "/"):
            token.tag_ = "HYPH"
        elif token.is_punct or word in "—…":
            token.tag_ = marks.get(word, ":")
        elif word in ("a", "an", "the"):
            token.tag_ = "DT"
        elif word == "to":
            token.tag_ = "TO"
        elif word in ("in", "by", "vs", "on", "of", "for", "at", "with"):
            token.tag_ = "IN"
        elif word == "used":
            token.tag_ = "VBD"
        elif before in _AFTER_VERBS:
            token.tag_ = "VB"
        elif before in ("have", "has", "had", "been", "was", "were", "is"):
            token.tag_ = "VBN"
        else:
            token.tag_ = "PRP" if word == "i" else "NN"
    return document


def missing_packages() -> list[str]:
    """Packages of the front end that are not installed."""
    names = ("misaki", "phonemizer", "espeakng_loader", "spacy")
    return [n for n in names if n not in sys.modules and importlib.util.find_spec(n) is None]
