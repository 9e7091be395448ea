"""Writes recordings with the teacher's word times, for `megakernel-tts calibrate --truth`.

python -m examples.train_voice.truth WORK speeches.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from examples.train_voice.layout import Work, summary
from examples.train_voice.phonemes import VOICES
from examples.train_voice.recordings import is_held_out
from examples.train_voice.speech import starts_of_words
from examples.train_voice.synthesis import shard_files
from megakernel_tts.calibration.ground_truth import FORMAT


def word_starts(work: Work) -> dict[int, list[float]]:
    """Start of each word in seconds, for every recorded text by its index in the corpus."""
    counts = [len(text.split()) for text in work.texts()]
    found: dict[int, list[float]] = {}
    for file in shard_files(work):
        with np.load(file) as shard:
            texts, starts = shard["text"].tolist(), shard["starts"]
        ends = np.cumsum([counts[i] for i in texts])
        pieces = np.split(starts, ends[:-1])
        found |= {i: piece.tolist() for i, piece in zip(texts, pieces, strict=True)}
    return found


def timed_speeches(work: Work, count: int) -> list[dict[str, Any]]:
    """Recordings that were not trained on.

    Args:
        work: The run, after `codes`.
        count: Number of recordings, at most.

    Returns:
        For each `text`, `voice`, `codes` [frames, groups] and `starts` in seconds of its words.
    """
    corpus, starts = work.read_corpus(), word_starts(work)
    with np.load(work.codes) as file:
        tables = {name: file[name] for name in ("codes", "frames", "text", "speaker")}
    ends = np.cumsum(tables["frames"])
    speeches: list[dict[str, Any]] = []
    for i in np.flatnonzero(is_held_out(tables["text"]))[:count]:
        index = int(tables["text"][i])
        frames = slice(int(ends[i] - tables["frames"][i]), int(ends[i]))
        speeches.append({
            "text": (text := corpus[index][1]),
            "voice": list(VOICES)[tables["speaker"][i]],
            "codes": tables["codes"][frames].tolist(),
            "starts": [round(start, 3) for start in starts_of_words(text, starts[index])],
        })  # fmt: skip
    return speeches


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `codes`")
    parser.add_argument("output", type=Path, help="a JSON file")
    parser.add_argument("--count", type=int, default=300, help="recordings")
    options = parser.parse_args()
    speeches = timed_speeches(Work(options.work), options.count)
    options.output.write_text(json.dumps({"format": FORMAT, "speeches": speeches}))
    print(f"{len(speeches)} recordings written to {options.output}")


if __name__ == "__main__":
    main()
