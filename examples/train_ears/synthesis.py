"""Speaks the corpus with random averages of the teacher's voices: shards of 16 kHz speech.

python -m examples.train_ears.synthesis WORK TEACHER --minutes 6
"""

import argparse
import random
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

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
from examples.train_voice.synthesis import SHARD, make_shards, write_arrays
from examples.train_voice.text import held_out_corpus
from megakernel_stt.model.config import SAMPLE_RATE

Job = tuple[Path, list[int], list[tuple[str, str]]]  # file, texts, (phonemes, style) of each


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


def synthesise(work: Work, synthesiser: Synthesiser, seed: int) -> Generator[float]:
    """Makes the held-out sentences' recordings and the missing shards.

    Args:
        work: The run, after `pronunciation`.
        synthesiser: The teacher.
        seed: Of the speakers.

    Yields:
        The duration of each new file in seconds.
    """
    work.recordings.mkdir(exist_ok=True)
    with ThreadPoolExecutor(1) as writer:  # writes a shard while the next one is spoken
        writing: Future[float] | None = None
        for file, texts, spoken in _jobs(work, seed):
            speeches = [speech.trimmed().audio for speech in synthesiser(spoken)]
            previous, writing = writing, writer.submit(_write, file, speeches, texts)
            if previous:
                yield previous.result()
        if writing:
            yield writing.result()


def missing_files(work: Work, seed: int) -> int:
    """Number of files that `synthesise` makes."""
    return sum(1 for _ in _jobs(work, seed))


def _jobs(work: Work, seed: int) -> Iterator[Job]:
    voice_work = VoiceWork(work.folder)
    held_out = [
        (i, (split_words(line)[0], held_out_style(VOICES[voice].accent, i)))
        for i, (voice, line) in enumerate(
            zip(_voices(held_out_corpus()), _lines(voice_work.held_out_phonemes), strict=True)
        )
        if VOICES[voice].language == "english"
    ]
    if not work.held_out.exists():
        yield work.held_out, [i for i, _ in held_out], [spoken for _, spoken in held_out]
    voices, lines = _voices(voice_work.read_corpus()), _lines(voice_work.phonemes)
    rng = random.Random(seed)
    spoken = [
        (split_words(line)[0], draw_style(VOICES[voice].accent, rng))
        for voice, line in zip(voices, lines, strict=True)
    ]
    for first in range(0, len(spoken), SHARD):
        file = work.recordings / f"teacher-{first // SHARD:05d}.npz"
        if not file.exists():
            part = spoken[first : first + SHARD]
            yield file, [*range(first, first + len(part))], part


def _voices(corpus: list[tuple[str, str]]) -> list[str]:
    return [voice for voice, _ in corpus]


def _lines(phonemes: Path) -> list[str]:
    return phonemes.read_text(encoding="utf-8").splitlines()


def _write(file: Path, speeches: list[NDArray[np.float32]], texts: list[int]) -> float:
    """Writes a shard; gives its duration in seconds."""
    waves = [soxr.resample(audio, TEACHER_RATE, SAMPLE_RATE) for audio in speeches]
    return write_shard(file, waves, texts)


def main() -> None:
    """Runs the command line."""
    from examples.train_voice.teacher.kokoro import Kokoro

    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `pronunciation`")
    parser.add_argument("teacher", type=Path, help="folder that the voice's `get.sh` made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="the time after which it ends"
    )
    options, start = parser.parse_args(), time.monotonic()
    teacher = Kokoro(options.teacher, torch.device(options.device))
    work = Work(options.work)
    missing = missing_files(work, options.seed)
    shards = synthesise(work, teacher, options.seed)
    print(f"{make_shards(shards, missing, options.minutes, start):.2f} hours of new speech")


if __name__ == "__main__":
    main()
