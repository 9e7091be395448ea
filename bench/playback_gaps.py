"""Gaps in speech that is played while other processes keep the processor busy.

Each turn is a request of `TTS.stream` with the default chunks, played from its first chunk on.
Busy processes compute without end; half a process computes and sleeps in turn. The command fails if
a turn whose real-time factor is below the limit has a gap.

python -m bench.playback_gaps --json bench/results/playback-gaps-cpu.json
"""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

from tqdm import tqdm

from bench.report import write
from megakernel_tts import TTS
from megakernel_tts.bench.timing import PlaybackGaps

_TEXT = "Good morning. I have found three flights to Madrid. Which one would you like to take?"
_PERIOD_S = 0.1  # of a process that computes for a share of the time
_MAX_REAL_TIME_FACTOR = 0.8  # beyond which gaps are expected
_BUSY_PROGRAM = """
import os, sys, time

busy_s, period_s = map(float, sys.argv[1:])
parent = os.getppid()
print("started", flush=True)
while os.getppid() == parent:
    end_s = time.perf_counter() + busy_s
    while time.perf_counter() < end_s:
        pass
    time.sleep(period_s - busy_s)
"""


@dataclass(frozen=True)
class Turn:
    """A request, read as fast as it is synthesised.

    Attributes:
        first_chunk_ms: Time to the first chunk.
        real_time_factor: Duration of the request, divided by that of its audio.
        audio_s: Duration of the audio.
        gaps_ms: Time without audio before each chunk that came late.
    """

    first_chunk_ms: float
    real_time_factor: float
    audio_s: float
    gaps_ms: tuple[float, ...]

    @property
    def fails(self) -> bool:
        """Whether there is a gap although the engine is fast enough."""
        return bool(self.gaps_ms) and self.real_time_factor < _MAX_REAL_TIME_FACTOR


def run_turn(tts: TTS, text: str, seed: int) -> Turn:
    """Synthesises a text and plays it.

    Args:
        tts: Warm.
        text: The text.
        seed: Of the sampling.
    """
    playback, audio_s, first_s = PlaybackGaps(), 0.0, None
    start_s = perf_counter()
    for chunk in tts.stream(text, sampling=replace(tts.sampling, seed=seed)):
        now_s, chunk_s = perf_counter(), len(chunk.pcm) / chunk.sample_rate
        first_s = now_s if first_s is None else first_s
        playback.add(now_s, chunk_s)
        audio_s += chunk_s
    assert first_s is not None, "the speech has no chunk"
    return Turn(
        first_chunk_ms=round(1e3 * (first_s - start_s), 1),
        real_time_factor=round((perf_counter() - start_s) / audio_s, 3),
        audio_s=round(audio_s, 2),
        gaps_ms=tuple(round(1e3 * gap_s, 1) for gap_s in playback.gaps_s),
    )


@contextmanager
def busy_processes(load: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Keeps processes busy that together compute for `load` seconds per second, if they may.

    Yields:
        The processes: one for each whole unit of the load, and one for the rest.
    """
    shares = [min(1.0, load - idx) for idx in range(math.ceil(load))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _BUSY_PROGRAM, str(share * _PERIOD_S), str(_PERIOD_S)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def main() -> int:
    """Prints the figures; writes them with --json; returns 1 if a turn fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10, help="number of turns (default: 10)")
    parser.add_argument("--load", type=float, default=1.5, help="busy processes (default: 1.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with TTS.load() as tts:
        tts.warmup()
        with busy_processes(options.load):
            turns = [run_turn(tts, _TEXT, seed) for seed in tqdm(range(options.turns))]
    figures = {
        "busy_processes": options.load,
        "other_load": round(load_before, 2),  # load average of the machine before the run
        "turns": [asdict(turn) for turn in turns],
        "turns_with_gaps": sum(bool(turn.gaps_ms) for turn in turns),
        "longest_gap_ms": max((gap for turn in turns for gap in turn.gaps_ms), default=0.0),
    }
    write(figures, options.json, ("torch",))
    return 1 if any(turn.fails for turn in turns) else 0


if __name__ == "__main__":
    sys.exit(main())
