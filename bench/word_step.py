"""Measures the engine thread's cost of word times per frame, beside the duration of a frame.

The online search runs on 256 units, the whole path on the scores of 256 tokens, for as many frames
as one launch makes. Figures are the minimum of many rounds.

python -m bench.word_step --json bench/results/word-step.json
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.report import write
from megakernel_tts.align.intervals import FRAME_INTERVALS
from megakernel_tts.align.online import OnlineSearch
from megakernel_tts.align.word_times import AlignedWordTimer
from megakernel_tts.align.words import Transcript

_NUM_TOKENS = 256  # of a long segment; as many units, except for runs of punctuation
_FRAME_S = 1.17e-3  # of the 0.6B model on an H200: bench/results/step-h200.json
_NUM_ROUNDS = 400
_SEARCH_FRAMES = 32  # pushed per round: the search allocates its rows for as many at a time


def minimum(act: Callable[[], object]) -> float:
    """The shortest duration of many rounds, in seconds."""
    best_s = float("inf")
    for _ in range(_NUM_ROUNDS):
        start_s = time.perf_counter()
        act()
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s


def time_search(num_frames: int) -> float:
    """Seconds per frame of the online search.

    Args:
        num_frames: Frames that are pushed together.
    """
    search = OnlineSearch()
    search.append_units([unit % 5 == 4 for unit in range(_NUM_TOKENS)])
    shape = (num_frames, _NUM_TOKENS)
    columns = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def act() -> None:
        for _ in range(_SEARCH_FRAMES // num_frames):
            search.push_frames(columns)

    return minimum(act) / _SEARCH_FRAMES


def time_word_times(num_frames: int, num_heads: int) -> float:
    """Seconds per frame from a launch's attention scores to the words of a chunk.

    Args:
        num_frames: Frames of the launch and of the chunk.
        num_heads: Alignment heads.
    """
    text = Transcript(lambda ids: [b"," if i % 5 == 4 else b" word" for i in ids])
    text.update(range(_NUM_TOKENS), _NUM_TOKENS)
    times = AlignedWordTimer(text, 16, 1e-4)
    shape = (num_frames, num_heads, 2048)
    scores = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    peaks = np.zeros((num_frames, FRAME_INTERVALS), np.uint16)

    def act() -> None:
        times.add_scores(scores)
        times.add_audio(peaks, last=False)

    return minimum(act) / num_frames


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    figures: dict[str, object] = {"tokens": _NUM_TOKENS, "kernel_ms_a_frame": 1e3 * _FRAME_S}
    for num_frames in (1, 2, 4, 8):
        search_s = time_search(num_frames)
        timer_s = {n: time_word_times(num_frames, n) for n in (1, 2, 8)}
        figures[f"{num_frames}_frames"] = {
            "search_us": round(1e6 * search_s, 2),
            **{f"whole_{n}_heads_us": round(1e6 * s, 2) for n, s in timer_s.items()},
            **{f"whole_{n}_heads_share": round(s / _FRAME_S, 4) for n, s in timer_s.items()},
        }
    write(figures, options.json, ())


if __name__ == "__main__":
    main()
