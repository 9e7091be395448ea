"""Speaks the corpus with random averages of the teacher's voices: shards of 16 kHz speech.

python -m examples.train_ears.synthesis WORK TEACHER --minutes 6 --workers 3
"""

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soxr
import torch
from numpy.typing import NDArray

from examples.train_ears.layout import Work
from examples.train_ears.voices import draw_style, held_out_style
from examples.train_voice.layout import Work as VoiceWork
from examples.train_voice.layout import summary
from examples.train_voice.phonemes import VOICES, split_words
from examples.train_voice.speech import SAMPLE_RATE as TEACHER_RATE
from examples.train_voice.speech import Synthesiser
from examples.train_voice.synthesis import (
    SHARD,
    load_teacher,
    make_in_workers,
    write_arrays,
)
from examples.train_voice.text import held_out_corpus
from megakernel_stt.model.config import SAMPLE_RATE


class Shard(NamedTuple):
    """Texts whose recordings are in one file.

    Attributes:
        file: The file.
        texts: Index of each text in the corpus.
        spoken: Phonemes and style of each.
    """

    file: Path
    texts: list[int]
    spoken: list[tuple[str, str]]


def write_shard(file: Path, waves: Sequence[NDArray[np.float32]], texts: Sequence[int]) -> float:
    """Writes recordings.

    Args:
        file: Written atomically.
        waves: float32 [samples] at 16 kHz of each.
        texts: Index of the text of each in the corpus.

    Returns:
        Their duration in seconds.
    """
    pcm = [np.clip(np.round(wave * 32767), -32768, 32767).astype(np.int16) for wave in waves]
    write_arrays(
        file,
        wave=np.concatenate(pcm),
        samples=np.array([len(one) for one in pcm]),
        text=np.array(texts),
    )
    return sum(map(len, pcm)) / SAMPLE_RATE


def synthesise(shard: Shard, synthesiser: Synthesiser) -> float:
    """Makes a shard; gives its duration in seconds."""
    speeches = (speech.trimmed().audio for speech in synthesiser(shard.spoken))
    waves = [soxr.resample(audio, TEACHER_RATE, SAMPLE_RATE) for audio in speeches]
    return write_shard(shard.file, waves, shard.texts)


def _synthesise_by_teacher(folder: Path, device: str, shard: Shard) -> float:
    return synthesise(shard, load_teacher(folder, device))


def missing_shards(work: Work, seed: int) -> list[Shard]:
    """The shards to be made, first the held-out sentences.

    Args:
        work: The run, after `pronunciation`.
        seed: Of the speakers.
    """
    work.recordings.mkdir(exist_ok=True)
    voice_work = VoiceWork(work.folder)
    held_out = [
        (i, (split_words(line)[0], held_out_style(VOICES[voice].accent, i)))
        for i, (voice, line) in enumerate(
            zip(_voices(held_out_corpus()), _lines(voice_work.held_out_phonemes), strict=True)
        )
        if VOICES[voice].language == "english"
    ]
    shards = [Shard(work.held_out, [i for i, _ in held_out], [spoken for _, spoken in held_out])]
    voices, lines = _voices(voice_work.read_corpus()), _lines(voice_work.phonemes)
    rng = random.Random(seed)
    spoken = [
        (split_words(line)[0], draw_style(VOICES[voice].accent, rng))
        for voice, line in zip(voices, lines, strict=True)
    ]
    for first in range(0, len(spoken), SHARD):
        file = work.recordings / f"teacher-{first // SHARD:05d}.npz"
        part = spoken[first : first + SHARD]
        shards.append(Shard(file, [*range(first, first + len(part))], part))
    return [shard for shard in shards if not shard.file.exists()]


def _voices(corpus: list[tuple[str, str]]) -> list[str]:
    return [voice for voice, _ in corpus]


def _lines(phonemes: Path) -> list[str]:
    return phonemes.read_text(encoding="utf-8").splitlines()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `pronunciation`")
    parser.add_argument("teacher", type=Path, help="folder that the voice's `get.sh` made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="the time after which it ends"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    options = parser.parse_args()
    shards = missing_shards(Work(options.work), options.seed)
    make = partial(_synthesise_by_teacher, options.teacher, options.device)
    hours = make_in_workers(shards, make, options.workers, options.minutes)
    print(f"{hours:.2f} hours of new speech")


if __name__ == "__main__":
    main()
