"""Times of whole requests, text in and PCM out, by way of the public face."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from threading import Barrier
from time import perf_counter
from typing import Literal

import numpy as np

from megakernel_tts.errors import SynthesisError
from megakernel_tts.sampling import Sampling
from megakernel_tts.session import ChunkPolicy
from megakernel_tts.tts import TTS
from megakernel_tts.voice import Voice

_PATIENCE = 2.0  # seconds after which a round is the last one


@dataclass(frozen=True)
class Request:
    """What is said, and how; every time with another seed."""

    text: str
    sampling: Sampling
    voice: str | Voice | None = None
    instruct: str | None = None
    layout: Literal["full", "streaming"] = "full"


@dataclass(frozen=True)
class Timing:
    """One request.

    Attributes:
        start: When its text was handed over, in seconds of `time.perf_counter`.
        first: When its first chunk was in host memory.
        end: When its last chunk was.
        frames: Of its speech.
        audio: How long that is, in seconds.
    """

    start: float
    first: float
    end: float
    frames: int
    audio: float


@dataclass(frozen=True)
class FirstChunk:
    """Milliseconds to the first chunk of one frame, one stream alone."""

    runs: int
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Streaming:
    """Streams that begin together, all to their end.

    Attributes:
        chunk_frames: Frames of every chunk.
        streams: How many.
        rounds: How often.
        ms_per_frame: Of one of the streams, the median.
        real_time_factor: Seconds until a stream's end for a second of its audio, the median.
        first_chunk_ms: Of the stream that is served first, second, and so on, the medians.
    """

    chunk_frames: int
    streams: int
    rounds: int
    ms_per_frame: float
    real_time_factor: float
    first_chunk_ms: tuple[float, ...]


def speak(tts: TTS, request: Request, chunk: int, seed: int) -> Timing:
    """Says it once in chunks of so many frames, to the end.

    Raises:
        SynthesisError: There was no speech.
    """
    sampling, chunks = replace(request.sampling, seed=seed), ChunkPolicy(chunk, chunk)
    frames, audio, first = 0, 0.0, None
    start = perf_counter()
    for part in tts.stream(
        request.text,
        request.voice,
        instruct=request.instruct,
        layout=request.layout,
        sampling=sampling,
        chunks=chunks,
    ):
        end = perf_counter()
        first = end if first is None else first
        frames += len(part.codes)
        audio += len(part.pcm) / part.sample_rate
    if first is None:
        raise SynthesisError("The model ended its speech before the first frame: nothing to time.")
    return Timing(start, first, perf_counter(), frames, audio)


def first_chunk(
    tts: TTS,
    request: Request,
    runs: int,
    done: Callable[[], object] = lambda: None,
    *,
    cold: bool = False,
) -> FirstChunk:
    """The time to the first chunk.

    Args:
        tts: Warm; used by nobody else meanwhile.
        request: What is said.
        runs: How often.
        done: Called after every one.
        cold: Whether the backend keeps nothing of the prompts before each one.
    """
    times: list[float] = []
    for seed in range(runs):
        if cold:
            tts._loaded.engine.backend.clear_prefix_cache()
        timing = speak(tts, request, 1, seed)
        times.append(1e3 * (timing.first - timing.start))
        done()
    p50, p95, p99 = np.percentile(times, (50, 95, 99)).tolist()
    return FirstChunk(runs, _ms(p50), _ms(p95), _ms(p99))


def streaming(tts: TTS, request: Request, chunk: int, streams: int, rounds: int) -> Streaming:
    """What streams take that begin together.

    Args:
        tts: Warm, with as many slots.
        request: What each says, every stream with a seed of its own.
        chunk: Frames of every chunk.
        streams: How many.
        rounds: How often at most; slow ones fewer times.
    """
    deadline = perf_counter() + _PATIENCE
    timings: list[Timing] = []
    arrivals: list[list[float]] = []
    with ThreadPoolExecutor(streams) as pool:
        for number in range(rounds):
            seeds = range(number * streams, (number + 1) * streams)
            together = _together(pool, tts, request, chunk, seeds)
            timings += together
            arrivals.append(sorted(1e3 * (t.first - t.start) for t in together))
            if perf_counter() > deadline:
                break
    return Streaming(
        chunk,
        streams,
        len(arrivals),
        _ms(median(1e3 * (t.end - t.start) / t.frames for t in timings)),
        round(median((t.end - t.start) / t.audio for t in timings), 4),
        tuple(_ms(median(place)) for place in zip(*arrivals, strict=True)),
    )


def _together(
    pool: ThreadPoolExecutor, tts: TTS, request: Request, chunk: int, seeds: Sequence[int]
) -> list[Timing]:
    """A round: each stream on a thread of its own, all let go at once."""
    barrier = Barrier(len(seeds))

    def one(seed: int) -> Timing:
        barrier.wait()
        return speak(tts, request, chunk, seed)

    return list(pool.map(one, seeds))


def _ms(milliseconds: float) -> float:
    """Rounded to microseconds."""
    return round(milliseconds, 3)
