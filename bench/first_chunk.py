"""Time to the first chunk of a new stream while others speak, with random weights on a GPU.

The others speak for a random time, 4 s in the mean, and begin anew, so that as many are open all
the time and they do not end together: with chunks of four frames and without pauses, so that the
GPU is busy, or live, read at the pace of playback. The new streams come at random times, one at a
time or, with `--burst`, several together, and are cancelled after their first chunk.

python -m bench.first_chunk --active 0,8,32 --json bench/results/first-chunk-0.6B-h200.json
python -m bench.first_chunk --active 32 --burst 32 --requests 20 --interval-ms 500
"""

import argparse
import asyncio
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from bench.conversation_figures import Percentiles, percentiles
from bench.conversations import random_tts
from bench.report import write
from bench.simulation import simulated_tts
from megakernel_tts import TTS, AudioChunk, ChunkPolicy, LivePolicy, Sampling
from megakernel_tts.bench.benchmark import ARRIVALS_TEXT, RANDOM_FRAMES
from megakernel_tts.bench.playback import PlaybackGaps
from megakernel_tts.cli.console import positive_integer, positive_number
from megakernel_tts.model.random_released import SIZES
from megakernel_tts.session import FRAME_S

Pace = Literal["live", "without pauses"]
_PACES: tuple[Pace, ...] = ("live", "without pauses")
_CHUNKS: dict[Pace, ChunkPolicy] = {
    "live": LivePolicy().chunks,
    "without pauses": ChunkPolicy(first=4, largest=4),
}


@dataclass(frozen=True)
class FirstChunks:
    """The first chunks beside a number of streams.

    Attributes:
        active: Streams that speak meanwhile.
        pace: How they are read.
        requests: Times at which new streams come.
        burst: New streams that come at each of these times.
        first_chunk_ms: From opening a new stream to its first chunk.
        active_frames_per_second: Frames of the streams that speak, all together.
        longest_wait_ms: Longest time without audio of a live stream that speaks, of which each
            chunk is read when the one before has been played: delays of the event loop, which wakes
            the reader, are part of it. 0 for streams without pauses.
    """

    active: int
    pace: Pace
    requests: int
    burst: int
    first_chunk_ms: Percentiles
    active_frames_per_second: float
    longest_wait_ms: float


class Speakers:
    """Streams that speak all the time.

    Attributes:
        num_frames: Frames that were read.
        playbacks: Of the live streams so far.
    """

    def __init__(self, tts: TTS, sampling: Sampling, pace: Pace) -> None:
        """Starts without a stream."""
        self.num_frames = 0
        self.playbacks: list[PlaybackGaps] = []
        self._tts, self._sampling = tts, sampling
        self._pace: Pace = pace

    async def speak(self, number: int, started: asyncio.Event) -> None:
        """Speaks again and again until it is cancelled.

        Args:
            number: Of the stream, for its random numbers.
            started: Is set at the first chunk.
        """
        chunks, rng = _CHUNKS[self._pace], random.Random(number)
        while True:
            max_frames = rng.randint(RANDOM_FRAMES // 2, RANDOM_FRAMES * 3 // 2)
            sampling = replace(self._sampling, seed=number, max_frames=max_frames)
            session = await self._tts.aopen(text=ARRIVALS_TEXT, sampling=sampling, chunks=chunks)
            playback = PlaybackGaps()
            self.playbacks.append(playback)
            with session:  # closed at once when the task is cancelled
                async for event in session:
                    if isinstance(event, AudioChunk):
                        started.set()
                        self.num_frames += len(event.codes)
                        if self._pace == "live":
                            audio_s = len(event.codes) * FRAME_S
                            played_s = playback.add(time.perf_counter(), audio_s)
                            await asyncio.sleep(played_s - time.perf_counter())
                    elif event.error is not None:
                        raise event.error


async def measure(
    tts: TTS, active: int, pace: Pace, *, requests: int, interval_s: float, burst: int = 1
) -> FirstChunks:
    """Measures new streams beside others.

    Args:
        tts: With a slot for each of them and of the new streams of one time.
        active: Streams that speak meanwhile.
        pace: How they are read.
        requests: Times at which new streams come.
        interval_s: Mean time from the first chunks to the next new streams.
        burst: New streams that come at each of these times.

    Raises:
        ExceptionGroup: A stream has failed.
    """
    sampling = replace(tts.sampling, guard=False)
    speakers, rng = Speakers(tts, sampling, pace), random.Random(0)
    started = [asyncio.Event() for _ in range(active)]
    async with asyncio.TaskGroup() as group:  # a speaker that fails ends the measurement
        tasks = [group.create_task(speakers.speak(i, event)) for i, event in enumerate(started)]
        for event in started:
            await event.wait()
        begin_s, begin_frames = time.perf_counter(), speakers.num_frames
        for playback in speakers.playbacks:  # while the streams began together
            playback.gaps_s.clear()
        first_s: list[float] = []
        for i in range(requests):
            await asyncio.sleep(rng.expovariate(1 / interval_s))
            seeds = range(active + i * burst, active + (i + 1) * burst)
            new = (_time_first_chunk(tts, replace(sampling, seed=seed)) for seed in seeds)
            first_s += await asyncio.gather(*new)
        seconds = time.perf_counter() - begin_s
        num_frames = speakers.num_frames - begin_frames
        gaps_s = [gap_s for playback in speakers.playbacks for gap_s in playback.gaps_s]
        for task in tasks:
            task.cancel()
    return FirstChunks(
        active,
        pace,
        requests,
        burst,
        percentiles(first_s),
        round(num_frames / seconds, 1),
        round(1e3 * max(gaps_s, default=0.0), 3),
    )


async def _time_first_chunk(tts: TTS, sampling: Sampling) -> float:
    """Seconds from opening a stream to its first chunk, after which it is cancelled."""
    begin_s = time.perf_counter()
    with await tts.aopen(text=ARRIVALS_TEXT, sampling=sampling) as session:
        async for event in session:
            if isinstance(event, AudioChunk):
                return time.perf_counter() - begin_s
    raise RuntimeError("The new stream has ended without audio; the log has its error.")


async def _measure_all(tts: TTS, options: argparse.Namespace) -> list[FirstChunks]:
    figures: list[FirstChunks] = []
    for active in options.active:
        for pace in _PACES if active else _PACES[:1]:
            row = await measure(
                tts,
                active,
                pace,
                requests=options.requests,
                interval_s=options.interval_ms / 1000,
                burst=options.burst,
            )
            print(
                f"{active} streams {pace}: first chunk, ms: {row.first_chunk_ms}; "
                f"longest wait, ms: {row.longest_wait_ms}",
                flush=True,
            )
            figures.append(row)
    return figures


def _counts(value: str) -> tuple[int, ...]:
    """Type of an option with numbers from 0 on, separated by commas."""
    return tuple(
        int(count) if count == "0" else positive_integer(count) for count in value.split(",")
    )


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, default="0.6B", help="size (default: 0.6B)")
    parser.add_argument(
        "--active",
        type=_counts,
        default=(0, 8, 32),
        metavar="N,N",
        help="numbers of streams that speak meanwhile (default: 0,8,32)",
    )
    parser.add_argument(
        "--requests", type=positive_integer, default=200, metavar="N", help="default: 200"
    )
    parser.add_argument(
        "--interval-ms",
        type=positive_number,
        default=50.0,
        metavar="MS",
        help="mean time from the first chunks to the next new streams (default: 50)",
    )
    parser.add_argument(
        "--burst",
        type=positive_integer,
        default=1,
        metavar="N",
        help="new streams that come together (default: 1)",
    )
    parser.add_argument("--simulated", action="store_true", help="an engine with fixed times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    slots = max(options.active) + options.burst
    print("weights, kernels and warm-up", flush=True)
    with simulated_tts(slots) if options.simulated else random_tts(options.model, slots) as tts:
        tts.warmup()
        figures = asyncio.run(_measure_all(tts, options))
    content: dict[str, object] = {"command": "bench.first_chunk", "model": "simulated"}
    if not options.simulated:
        content |= {
            "model": f"{options.model}, random weights",
            "gpu": torch.cuda.get_device_name(),
        }
    write(content | {"figures": [asdict(row) for row in figures]}, options.json, ("torch",))


if __name__ == "__main__":
    main()
