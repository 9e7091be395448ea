"""What finding words costs the engine's thread, beside the time of a frame on the kernel.

The search takes the columns of 256 units, and everything takes the scores of 256 tokens, for as
many frames as one launch makes; the least of many rounds.

python -m bench.word_step --json bench/results/word-step.json
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.report import write
from megakernel_tts.align.online import OnlineSearch
from megakernel_tts.align.word_times import AlignedTimes
from megakernel_tts.align.words import Transcript

_TOKENS = 256  # and as many units but for runs of punctuation: a long piece
_FRAME = 1.6e-3  # seconds, of the 0.6B on an H200: bench/LOG.md, sixth session
_ROUNDS = 400
_SAMPLES = 1920


def least(act: Callable[[], object]) -> float:
    """The shortest of many rounds, in seconds."""
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - start)
    return best


def search_step(frames: int) -> float:
    """Seconds a frame in the search alone."""
    search = OnlineSearch()
    search.append([unit % 5 == 4 for unit in range(_TOKENS)])
    columns = np.random.default_rng(0).normal(size=(frames, _TOKENS)).astype(np.float32)

    def turn() -> None:  # as many frames as are laid out together
        for _ in range(32 // frames):
            search.push(columns)

    return least(turn) / 32


def whole_step(frames: int, heads: int) -> float:
    """Seconds a frame from a launch's scores to the words of a chunk of as many frames."""
    text = Transcript(lambda ids: [b"," if i % 5 == 4 else b" word" for i in ids])
    text.write(range(_TOKENS), _TOKENS)
    times = AlignedTimes(text, 24_000, 16, 1e-4)
    shape = (frames, heads, 2048)
    scores = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    pcm = np.zeros((frames, _SAMPLES), np.int16)

    def turn() -> None:
        times.look(scores)
        times.hear(pcm, last=False)

    return least(turn) / frames


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, object] = {"tokens": _TOKENS, "kernel_ms_a_frame": 1e3 * _FRAME}
    for frames in (1, 2, 4, 8):
        alone, heads = search_step(frames), {n: whole_step(frames, n) for n in (1, 2, 8)}
        figures[f"{frames}_frames"] = {
            "search_us": round(1e6 * alone, 2),
            **{f"whole_{n}_heads_us": round(1e6 * s, 2) for n, s in heads.items()},
            **{f"whole_{n}_heads_share": round(s / _FRAME, 4) for n, s in heads.items()},
        }
    write(figures, options.json, ())


if __name__ == "__main__":
    main()
