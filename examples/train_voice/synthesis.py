"""Speaks the corpus with the teacher: shards of 24 kHz speech with phones and words by frame.

Several processes share the GPU, since each of them also computes on the processor.

python -m examples.train_voice.synthesis WORK TEACHER --workers 3
"""

import argparse
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from examples.train_voice.layout import Work, summary
from examples.train_voice.phonemes import VOICES, split_words
from examples.train_voice.speech import SAMPLE_RATE, Synthesiser, TeacherSpeech
from examples.train_voice.text import held_out_corpus
from examples.train_voice.workers import worker_processes

SHARD = 2000  # texts: the teacher's batches need many of equal length, `codec` waits for a shard
_MIN_S, _MAX_S = 0.25, 32.0
_RATE = 0.9  # of the teacher: the codec loses fewer words of slower speech
Lines = list[tuple[str, str]]  # voice and line of the phonemes file of each text
S = TypeVar("S")


def shard_files(work: Work) -> list[Path]:
    """Files of all shards of the corpus, whether they exist or not."""
    count = -(-len(work.read_corpus()) // SHARD)
    return [work.recordings / f"{i:05d}.npz" for i in range(count)]


class Shard(NamedTuple):
    """Texts whose recordings are in one file.

    Attributes:
        file: The file.
        lines: The texts.
        first: Index of the first one in the corpus.
    """

    file: Path
    lines: Lines
    first: int


def missing_shards(work: Work) -> list[Shard]:
    """The shards to be made; the held-out sentences are the second one."""
    work.recordings.mkdir(exist_ok=True)
    held_out = _lines(held_out_corpus(), work.held_out_phonemes)
    corpus = _lines(work.read_corpus(), work.phonemes)
    shards = [
        Shard(file, corpus[i * SHARD : (i + 1) * SHARD], i * SHARD)
        for i, file in enumerate(shard_files(work))
    ]
    shards.insert(1, Shard(work.held_out_speech, held_out, 0))  # `codec` waits for the first one
    return [shard for shard in shards if not shard.file.exists()]


def synthesise(shard: Shard, synthesiser: Synthesiser) -> float:
    """Makes a shard; gives its duration in seconds."""
    texts = [(split_words(line)[0], VOICES[voice].style) for voice, line in shard.lines]
    arrays = label(shard.lines, synthesiser(texts), shard.first)
    write_arrays(shard.file, **arrays)
    return len(arrays["wave"]) / SAMPLE_RATE


@cache
def load_teacher(folder: Path, device: str, rate: float = 1.0) -> Synthesiser:
    """Loads the teacher, once in each process; rate: how fast it speaks."""
    from examples.train_voice.teacher.kokoro import Kokoro

    return Kokoro(folder, torch.device(device), rate)


def _synthesise_by_teacher(folder: Path, device: str, shard: Shard) -> float:
    return synthesise(shard, load_teacher(folder, device, _RATE))


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


def make_shards(
    shards: Sequence[S],
    make: Callable[[S], float],
    pool: Executor,
    workers: int,
    minutes: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Makes shards for a time, several at once, with a progress bar.

    Args:
        shards: The shards, in order.
        make: Makes one and gives its duration in seconds.
        pool: Runs `make`.
        workers: Shards at once.
        minutes: The time after the call; no shard is begun that would exceed it if it took as long
            as those that ended last. (The first ones take longer: the teacher is compiled.)
        clock: Time in seconds.

    Returns:
        Hours of speech.

    Raises:
        Exception: What `make` raised, after the shards that were begun have ended.
    """
    start_s, duration_s, latest_s = clock(), 0.0, 0.0
    begun_s: dict[Future[float], float] = {}
    left = deque(shards)
    with tqdm(total=len(shards), desc="shards", disable=None) as progress:
        while True:
            now_s = clock()
            while left and len(begun_s) < workers:
                if now_s - start_s + latest_s > 60 * minutes:
                    left.clear()
                    break
                begun_s[pool.submit(make, left.popleft())] = now_s
            if not begun_s:
                return duration_s / 3600
            done, _ = wait(begun_s, return_when=FIRST_COMPLETED)
            latest_s = max(clock() - begun_s.pop(future) for future in done)
            for future in done:
                duration_s += future.result()
                progress.update()
                progress.set_postfix_str(f"{duration_s / 3600:.2f} h")


def make_in_workers(
    shards: Sequence[S], make: Callable[[S], float], workers: int, minutes: float
) -> float:
    """Makes shards as `make_shards` does, in so many processes."""
    with worker_processes(workers, max(1, (os.cpu_count() or 1) // workers)) as pool:
        return make_shards(shards, make, pool, workers, minutes)


def write_arrays(file: Path, **arrays: NDArray[Any]) -> None:
    """Writes arrays to an npz file, which is complete once it exists."""
    part = file.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as out:
        np.savez(out, allow_pickle=False, **arrays)
    part.rename(file)


def main() -> None:
    """Runs the command line."""
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
    parser.add_argument("--workers", type=int, default=1, help="processes")
    options = parser.parse_args()
    work = Work(options.work)
    make = partial(_synthesise_by_teacher, options.teacher, options.device)
    hours = make_in_workers(missing_shards(work), make, options.workers, options.minutes)
    print(f"{hours:.2f} hours of new speech, {shorten_corpus(work)} texts")


if __name__ == "__main__":
    main()
