"""Speaks the corpus with the teacher: shards of 24 kHz speech with phones and words by frame.

python -m examples.train_voice.synthesis WORK TEACHER
"""

import argparse
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from examples.train_voice.layout import Work, summary
from examples.train_voice.phonemes import VOICES, split_words
from examples.train_voice.speech import SAMPLE_RATE, Synthesiser, TeacherSpeech
from examples.train_voice.text import held_out_corpus

SHARD = 4000  # texts: the teacher's batches need many of equal length
_MIN_S, _MAX_S = 0.25, 32.0
Lines = list[tuple[str, str]]  # voice and line of the phonemes file of each text


def shard_files(work: Work) -> list[Path]:
    """Files of all shards of the corpus, whether they exist or not."""
    count = -(-len(work.read_corpus()) // SHARD)
    return [work.recordings / f"{i:05d}.npz" for i in range(count)]


def synthesise(work: Work, synthesiser: Synthesiser) -> Generator[float]:
    """Makes the missing shards, and after the first one the held-out sentences' recordings.

    Args:
        work: The run, after `pronunciation`.
        synthesiser: The teacher.

    Yields:
        The duration of each new file in seconds.
    """
    work.recordings.mkdir(exist_ok=True)
    held_out = _lines(held_out_corpus(), work.held_out_phonemes)
    corpus = _lines(work.read_corpus(), work.phonemes)
    jobs = [
        (file, corpus[i * SHARD : (i + 1) * SHARD], i * SHARD)
        for i, file in enumerate(shard_files(work))
    ]
    jobs.insert(1, (work.held_out_speech, held_out, 0))  # `codec` waits for the first shard
    with ThreadPoolExecutor(1) as writer:  # writes a shard while the next one is spoken
        writing: Future[float] | None = None
        for file, lines, first in jobs:
            if file.exists():
                continue
            texts = [(split_words(line)[0], VOICES[voice].style) for voice, line in lines]
            speeches = synthesiser(texts)
            previous, writing = writing, writer.submit(_write, file, lines, speeches, first)
            if previous:
                yield previous.result()
        if writing:
            yield writing.result()


def shorten_corpus(work: Work) -> int:
    """Removes the texts after the first missing shard; gives the number of those that remain."""
    exist = [file.exists() for file in shard_files(work)]
    corpus, phonemes = work.read_corpus(), work.phonemes.read_text(encoding="utf-8").splitlines()
    count = min(len(corpus), SHARD * [*exist, False].index(False))
    work.write_corpus(corpus[:count])
    lines = (f"{line}\n" for line in phonemes[:count])
    work.phonemes.write_text("".join(lines), encoding="utf-8")
    return count


def _lines(corpus: list[tuple[str, str]], phonemes: Path) -> Lines:
    lines = phonemes.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(corpus), "run `pronunciation` again: the corpus has changed"
    return [(voice, line) for (voice, _), line in zip(corpus, lines, strict=True)]


def label(lines: Lines, speeches: list[TeacherSpeech], first: int) -> dict[str, NDArray[Any]]:
    """Cuts and labels speech.

    Args:
        lines: Voice and phonemes of each text.
        speeches: The teacher's speech of each text.
        first: Index of the first text in the corpus.

    Returns:
        Arrays of a shard: `wave` int16 [samples], `phones` uint8 [frames, 2], `words` int16
        [frames, 2] and `starts` float32 [words], the words' starts in seconds, of all texts;
        `frames`, `text` and `speaker` of each text.
    """
    names = list(VOICES)
    columns: dict[str, list[Any]] = {
        k: [] for k in ("wave", "phones", "words", "starts", "frames", "text", "speaker")
    }
    for i, ((voice, line), whole) in enumerate(zip(lines, speeches, strict=True)):
        speech, (_, spans) = whole.trimmed(), split_words(line)
        if not _MIN_S <= len(speech.audio) / SAMPLE_RATE <= _MAX_S:
            continue
        wave, phones, words = speech.levelled().frames(spans)
        starts = np.array(speech.word_starts(spans), np.float32)
        row = (wave, phones, words, starts, len(words), first + i, names.index(voice))
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    joined = {k: np.concatenate(columns[k]) for k in ("wave", "phones", "words", "starts")}
    return joined | {k: np.array(columns[k]) for k in ("frames", "text", "speaker")}


def _write(file: Path, lines: Lines, speeches: list[TeacherSpeech], first: int) -> float:
    """Writes a shard; gives its duration in seconds."""
    arrays = label(lines, speeches, first)
    write_arrays(file, **arrays)
    return len(arrays["wave"]) / SAMPLE_RATE


def make_shards(shards: Generator[float], count: int, minutes: float, start: float) -> float:
    """Makes shards for a time, with a progress bar.

    Args:
        shards: Makes one at a time and gives its duration in seconds.
        count: Of the shards.
        minutes: The time that the program may take; no shard is begun that would exceed it if it
            took as long as the last one.
        start: When the program began, by `time.monotonic`.

    Returns:
        Hours of speech.
    """
    duration_s, last_s = 0.0, time.monotonic() - start
    with closing(shards), tqdm(total=count, desc="shards", disable=None) as progress:
        for shard_s in shards:
            duration_s += shard_s
            progress.update()
            progress.set_postfix_str(f"{duration_s / 3600:.2f} h")
            used_s = time.monotonic() - start
            if used_s + (used_s - last_s) > 60 * minutes:
                break
            last_s = used_s
    return duration_s / 3600


def write_arrays(file: Path, **arrays: NDArray[Any]) -> None:
    """Writes arrays to an npz file, which is complete once it exists."""
    part = file.with_suffix(".part")
    with part.open("wb") as out:
        np.savez(out, allow_pickle=False, **arrays)
    part.rename(file)


def main() -> None:
    """Runs the command line."""
    from examples.train_voice.teacher.kokoro import Kokoro

    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `pronunciation`")
    parser.add_argument("teacher", type=Path, help="folder that `teacher/get.sh` made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="the time after which the corpus is shortened to the texts that are recorded",
    )
    options, start = parser.parse_args(), time.monotonic()
    teacher = Kokoro(options.teacher, torch.device(options.device))
    work = Work(options.work)
    missing = sum(not file.exists() for file in (work.held_out_speech, *shard_files(work)))
    hours = make_shards(synthesise(work, teacher), missing, options.minutes, start)
    print(f"{hours:.2f} hours of new speech, {shorten_corpus(work)} texts")


if __name__ == "__main__":
    main()
