"""Speech to text by pocketsphinx, and how many words differ.

What is fair: every condition is heard by the same recogniser with the same language model, so that
figures compare with each other, and with the synthesiser's own recordings as the floor. The model
is a bigram of the training corpus whose vocabulary holds the common words and those of the judged
sentences: it knows the words, but not the sentences, none of which is in the corpus. The general
model of the package knows neither and hears the recordings themselves far worse; a model of the
sentences would know them before they are heard.
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

_RATE = 16_000
_DISCOUNT = 0.6
_COMMON = 8  # times in the corpus


def words_of(text: str) -> list[str]:
    """What is compared: lower-case words without punctuation."""
    plain = re.sub(r"[^a-z' ]", " ", text.lower().replace("’", "'"))
    return [word.strip("'") for word in plain.split() if word.strip("'")]


def errors(wanted: Sequence[str], heard: Sequence[str]) -> int:
    """Words to insert, delete or replace."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(wanted, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            best = min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
            diagonal, row[j] = row[j], best
    return row[-1]


def known_words() -> set[str]:
    """The pronouncing dictionary's words."""
    file = Path(pocketsphinx.get_model_path("en-us/cmudict-en-us.dict"))
    return {line.split()[0] for line in file.read_text(encoding="utf-8").splitlines()}


def write_language_model(file: Path, corpus: Iterable[str], judged: Iterable[str]) -> None:
    """Writes a bigram model (ARPA) with absolute discounting.

    Args:
        file: To write.
        corpus: Texts that the probabilities come from.
        judged: Texts whose words must be in the vocabulary.
    """
    sentences = [words_of(text) for text in corpus]
    often = Counter(word for sentence in sentences for word in sentence)
    vocabulary = {w for w, n in often.items() if n >= _COMMON}
    vocabulary |= {word for text in judged for word in words_of(text)}
    vocabulary &= known_words()
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


class Judge:
    """A recogniser with one language model."""

    def __init__(self, language_model: Path) -> None:
        self._decoder = pocketsphinx.Decoder(
            samprate=_RATE, lm=str(language_model), loglevel="FATAL"
        )

    def hear(self, samples: NDArray[np.int16], rate: int) -> str:
        """What it understands."""
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
        """Word error rate over all sentences together, and what was heard."""
        heard = [self.hear(samples, rate) for samples in speech]
        wrong = sum(errors(words_of(s), words_of(h)) for s, h in zip(spoken, heard, strict=True))
        return wrong / sum(len(words_of(s)) for s in spoken), heard
