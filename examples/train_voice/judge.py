"""Word error rates of speech by the recogniser pocketsphinx.

All conditions use the same recogniser and language model, so that their rates are comparable, also
with the rate of the synthesiser's recordings, the lower bound. Neither of the two language models
is trained on the sentences. The general English model of the package depends most on context: it
completes words that are unclear. A bigram of the training corpus, whose vocabulary contains the
common words and those of the evaluated sentences, depends more on the audio, because the corpus is
not meaningful. A model trained on the sentences would recognise them without the audio.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pocketsphinx
import soxr
from numpy.typing import NDArray

from examples.train_voice.spoken import spoken_words
from examples.train_voice.symbols import SPELLED

_RATE = 16_000
_DISCOUNT = 0.6
_MIN_COUNT = 8  # of a common word in the corpus
_MAX_JOINED = 6  # words that may be written as one
_FIGURES = (
    (r"\b(\d{1,2})\.([0-5]\d)(?!\d)", r"\1:\2"),
    (r"(?<![\d,.:$€£])(\d{1,2})([0-5]\d)(?![\d,.:]\d|\d)", r"\1:\2"),
    (r"\$(\d+),?(\d)00 and \$?(\d\d)\b", r"$\1,\2\3"),
    (r"\b(\d+),?(\d)00 and (\d\d)\b", r"\1,\2\3"),
)
_ACCENTS = str.maketrans("áéíóúü", "aeiouu")  # do not change what is heard
_SPELLINGS = (
    (r"\b(colo|favo|neighbo|hono|labo|harbo|flavo|behavio)ur", r"\1or"),
    (r"\bgrey\b", "gray"), (r"cancelled", "canceled"), (r"met(re|res)\b", "meters"),
    (r"\bok\b", "okay"), (r"\bmiz\b", "ms"), (r"\bmister\b", "mr"), (r"\bmissus\b", "mrs"),
)  # fmt: skip


def words_of(text: str) -> list[str]:
    """Words for comparison: in lower case and without punctuation."""
    plain = re.sub(r"[^a-záéíóúüñ' ]", " ", text.lower().replace("’", "'"))
    return [word.strip("'") for word in plain.split() if word.strip("'")]


def normalised_words(text: str, language: str) -> list[str]:
    """Spoken words of a text for comparison, whether numbers are in figures or in words."""
    said = " ".join(" ".join(group) for group in spoken_words(text, language))
    said = re.sub(r"\b(hundred|thousand|million) and\b", r"\1", said.lower())
    for british, american in _SPELLINGS:
        said = re.sub(british, american, said)
    return words_of(said.replace(SPELLED, " ").translate(_ACCENTS))


def errors(expected: Sequence[str], recognised: Sequence[str]) -> int:
    """Number of words to insert, delete or replace.

    Words that differ only by blanks, such as `a p i` and `api`, are equal.
    """
    columns = len(recognised) + 1
    table = [[i + j for j in range(columns)] for i in range(len(expected) + 1)]
    for i in range(1, len(expected) + 1):
        for j in range(1, columns):
            wrong = expected[i - 1] != recognised[j - 1]
            best = min(table[i - 1][j] + 1, table[i][j - 1] + 1, table[i - 1][j - 1] + wrong)
            for m in range(1, min(i, _MAX_JOINED) + 1):
                for n in range(1, min(j, _MAX_JOINED) + 1):
                    if 1 in (m, n) and table[i - m][j - n] < best:
                        same = "".join(expected[i - m : i]) == "".join(recognised[j - n : j])
                        best = table[i - m][j - n] if same else best
            table[i][j] = best
    return table[-1][-1]


def text_errors(expected: str, transcript: str, language: str) -> int:
    """Number of wrong words of a transcript, in the reading of its figures that fits best.

    Recognisers write `8:15` also as `815` or `8.15`, and `$2,375` as `$2,300 and $75`.
    """
    words = normalised_words(expected, language)
    readings = {transcript}
    for pattern, replacement in _FIGURES:
        readings |= {re.sub(pattern, replacement, reading) for reading in readings}
    return min(errors(words, normalised_words(reading, language)) for reading in readings)


def pronunciations() -> list[str]:
    """Lines of the recogniser's dictionary; further ones of a word begin with `word(2)`."""
    file = Path(pocketsphinx.get_model_path("en-us/cmudict-en-us.dict"))
    return file.read_text(encoding="utf-8").splitlines()


def dictionary_words() -> set[str]:
    """Words of the recogniser's pronunciation dictionary."""
    return {line.split()[0] for line in pronunciations()}


def dictionary_of(language_model: Path) -> Path:
    """The file with the pronunciations of a language model's words."""
    return language_model.with_suffix(".dict")


def write_language_model(file: Path, corpus: Iterable[str], judged: Iterable[str]) -> None:
    """Writes a bigram model (ARPA) with absolute discounting, and the dictionary of its words.

    With its whole dictionary the recogniser takes seconds to load a model.

    Args:
        file: The file.
        corpus: Texts that give the probabilities.
        judged: Texts whose words must be in the vocabulary.
    """
    sentences = [words_of(text) for text in corpus]
    counts = Counter(word for sentence in sentences for word in sentence)
    vocabulary = {w for w, n in counts.items() if n >= _MIN_COUNT}
    vocabulary |= {word for text in judged for word in words_of(text)}
    vocabulary &= dictionary_words()
    single: Counter[str] = Counter(vocabulary)
    pairs: Counter[tuple[str, str]] = Counter()
    for sentence in sentences:
        marked = ["<s>", *(w for w in sentence if w in vocabulary), "</s>"]
        single.update(marked)
        pairs.update(pairwise(marked))
    total = sum(single.values()) - single["<s>"]
    after: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for (first, second), count in pairs.items():
        after[first].append((second, count))
    head = f"\\data\\\nngram 1={len(single)}\nngram 2={len(pairs)}\n\n\\1-grams:"
    lines = [head]
    seen = {word: sum(count for _, count in follow) for word, follow in after.items()}
    for word in sorted(single):
        share = single[word] / total if word != "<s>" else 1e-9
        back_off = 1.0
        if word in after:
            used = sum(single[follower] / total for follower, _ in after[word])
            back_off = _DISCOUNT * len(after[word]) / seen[word] / max(1e-6, 1 - used)
        lines.append(f"{math.log10(share):.4f} {word} {math.log10(back_off):.4f}")
    lines.append("\n\\2-grams:")
    for first in sorted(after):
        for second, count in sorted(after[first]):
            share = (count - _DISCOUNT) / seen[first]
            lines.append(f"{math.log10(share):.4f} {first} {second}")
    file.write_text("\n".join([*lines, "", "\\end\\", ""]), encoding="utf-8")
    spoken = [line for line in pronunciations() if line.split()[0].split("(")[0] in vocabulary]
    dictionary_of(file).write_text("\n".join([*spoken, ""]), encoding="utf-8")


class Judge:
    """A recogniser with one language model."""

    def __init__(self, language_model: Path | None) -> None:
        """Loads a model of `write_language_model`, or the package's general English one."""
        chosen: dict[str, str] = {}
        if language_model is not None:
            chosen = {"lm": str(language_model), "dict": str(dictionary_of(language_model))}
        self._decoder = pocketsphinx.Decoder(samprate=_RATE, loglevel="FATAL", **chosen)

    def transcribe(self, samples: NDArray[np.int16], rate: int) -> str:
        """Recognises speech.

        Args:
            samples: int16 [samples].
            rate: Their sample rate.
        """
        wave = soxr.resample(samples.astype(np.float32), rate, _RATE)
        wave = np.pad(wave, (_RATE // 10, _RATE // 5))
        self._decoder.start_utt()
        pcm = np.clip(np.round(wave), -32768, 32767).astype(np.int16)
        self._decoder.process_raw(pcm.tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return found.hypstr if found else ""

    def error_rate(
        self, speech: Sequence[NDArray[np.int16]], rate: int, spoken: Sequence[str]
    ) -> tuple[float, list[str]]:
        """Word error rate over all sentences, and the recognised texts."""
        texts = [self.transcribe(samples, rate) for samples in speech]
        pairs = zip(spoken, texts, strict=True)
        num_errors = sum(errors(words_of(s), words_of(t)) for s, t in pairs)
        return num_errors / sum(len(words_of(s)) for s in spoken), texts
