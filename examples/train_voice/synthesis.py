"""Synthesises the corpus with flite, in parallel: shards of 24 kHz speech with phones and words.

python -m examples.train_voice.synthesis WORK
"""

import argparse
import multiprocessing
import os
from functools import cache
from pathlib import Path

import numpy as np
import soxr
from numpy.typing import NDArray
from tqdm import tqdm

from examples.train_voice.flite import SAMPLE_RATE, Flite, Segment
from examples.train_voice.layout import VOICES, Work, summary

FRAME = 1920  # samples at 24 kHz, 80 ms
SHARD = 250  # texts
_MIN_DURATION_S, _MAX_DURATION_S = 0.1, 14.0


@cache
def _flite() -> Flite:
    """The synthesiser; one per process."""
    return Flite()


def shard_files(work: Work) -> list[Path]:
    """Files of all shards of the corpus, whether they exist or not."""
    count = -(-len(work.texts()) // SHARD)
    return [work.recordings / f"{i:05d}.npz" for i in range(count)]


def resample(samples: NDArray[np.int16]) -> NDArray[np.int16]:
    """Resamples 16 kHz to 24 kHz and pads with silence to whole frames."""
    wave = soxr.resample(samples.astype(np.float32), SAMPLE_RATE, 24_000)
    wave = np.pad(wave, (0, -len(wave) % FRAME))
    return np.clip(np.round(wave), -32768, 32767).astype(np.int16)


def align(utterance: Segment, frames: int) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """Phones [frames, 2] at 1/4 and 3/4 of each frame, and words [frames] at 1/4."""
    times = (np.arange(frames)[:, None] + np.array([0.25, 0.75])) * 0.08
    segment = np.searchsorted(utterance.ends, times).clip(max=len(utterance.ends) - 1)
    phones = utterance.phones[segment].astype(np.uint8)
    return phones, utterance.words[segment[:, 0]].astype(np.int16)


def _make(job: tuple[Path, int, list[str]]) -> float:
    """Makes a shard; gives its duration in seconds."""
    file, first, texts = job
    speakers = np.random.default_rng(first).integers(0, len(VOICES), len(texts))
    waves: list[NDArray[np.int16]] = []
    phones: list[NDArray[np.uint8]] = []
    words: list[NDArray[np.int16]] = []
    kept: list[int] = []
    for i, text in enumerate(texts):
        speech = _flite().speak(text, list(VOICES.values())[speakers[i]])
        if not _MIN_DURATION_S <= len(speech.samples) / SAMPLE_RATE <= _MAX_DURATION_S:
            continue
        wave = resample(speech.samples)
        phone, word = align(speech, len(wave) // FRAME)
        waves.append(wave)
        phones.append(phone)
        words.append(word)
        kept.append(i)
    part = file.with_suffix(".part")
    with part.open("wb") as out:
        np.savez(
            out,
            wave=np.concatenate(waves),
            phones=np.concatenate(phones),
            words=np.concatenate(words),
            frames=np.array([len(p) for p in phones]),
            text=np.array(kept) + first,
            speaker=speakers[kept],
        )
    part.rename(file)
    return sum(map(len, waves)) / 24_000


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `text`")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    work = Work(options.work)
    work.recordings.mkdir(exist_ok=True)
    texts = work.texts()
    jobs = [
        (file, i * SHARD, texts[i * SHARD : (i + 1) * SHARD])
        for i, file in enumerate(shard_files(work))
        if not file.exists()
    ]
    duration_s = 0.0
    with (
        multiprocessing.get_context("spawn").Pool(options.processes) as pool,
        tqdm(total=len(jobs), desc="shards", disable=None) as progress,
    ):
        for shard_s in pool.imap(_make, jobs):
            duration_s += shard_s
            progress.update()
            progress.set_postfix_str(f"{duration_s / 3600:.2f} h")
    print(f"{duration_s / 3600:.2f} hours of speech in {len(jobs)} new shards")


if __name__ == "__main__":
    main()
