"""Times whole requests, from text to PCM, through the public API."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from threading import Barrier
from time import perf_counter
from typing import Literal

import numpy as np

from megakernel_tts import TTS, ChunkPolicy, Sampling, SynthesisError, Voice

_MAX_SECONDS = 2.0  # of rounds; the round in progress is completed


@dataclass(frozen=True)
class BenchmarkRequest:
    """A request of the benchmark. It is repeated with different seeds."""

    text: str
    sampling: Sampling
    voice: str | Voice | None = None
    instruct: str | None = None
    layout: Literal["full", "streaming"] = "full"


@dataclass(frozen=True)
class RequestTiming:
    """Times of one request, in seconds of `time.perf_counter`.

    Attributes:
        start_s: When the text was passed to the engine.
        first_s: When the first chunk was in host memory.
        end_s: When the last chunk was in host memory.
        frames: Frames of the speech.
        audio_s: Duration of the speech.
    """

    start_s: float
    first_s: float
    end_s: float
    frames: int
    audio_s: float


@dataclass(frozen=True)
class FirstChunk:
    """Milliseconds to the first chunk, of one frame, of a single stream."""

    runs: int
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Streaming:
    """Figures of streams that begin at the same time and run to their ends.

    Attributes:
        chunk_frames: Frames per chunk.
        streams: Number of streams.
        rounds: Number of rounds.
        ms_per_frame: Time of a stream divided by its frames, median.
        real_time_factor: Time of a stream divided by the duration of its audio, median.
        first_chunk_ms: Time to the first chunk of the stream that is served first, second, and so
            on, medians.
    """

    chunk_frames: int
    streams: int
    rounds: int
    ms_per_frame: float
    real_time_factor: float
    first_chunk_ms: tuple[float, ...]


def time_request(tts: TTS, request: BenchmarkRequest, chunk: int, seed: int) -> RequestTiming:
    """Times one request.

    Args:
        tts: Warm.
        request: The request.
        chunk: Frames per chunk.
        seed: Of the sampling.

    Raises:
        SynthesisError: The speech has no frames.
    """
    sampling, chunks = replace(request.sampling, seed=seed), ChunkPolicy(chunk, chunk)
    frames, audio_s, first_s = 0, 0.0, None
    start_s = perf_counter()
    for audio_chunk in tts.stream(
        request.text,
        request.voice,
        instruct=request.instruct,
        layout=request.layout,
        sampling=sampling,
        chunks=chunks,
    ):
        end_s = perf_counter()
        first_s = end_s if first_s is None else first_s
        frames += len(audio_chunk.codes)
        audio_s += len(audio_chunk.pcm) / audio_chunk.sample_rate
    if first_s is None:
        raise SynthesisError("The speech ended before its first frame, so it cannot be timed.")
    return RequestTiming(start_s, first_s, perf_counter(), frames, audio_s)


def time_first_chunk(
    tts: TTS,
    request: BenchmarkRequest,
    runs: int,
    done: Callable[[], object] = lambda: None,
    *,
    cold: bool = False,
) -> FirstChunk:
    """Measures the time to the first chunk.

    Args:
        tts: Warm, without other streams.
        request: The request.
        runs: Number of requests.
        done: Called after each request.
        cold: Whether the prefix cache is cleared before each request.
    """
    times: list[float] = []
    for seed in range(runs):
        if cold:
            tts._loaded.engine.backend.clear_prefix_cache()
        timing = time_request(tts, request, 1, seed)
        times.append(1e3 * (timing.first_s - timing.start_s))
        done()
    p50, p95, p99 = np.percentile(times, (50, 95, 99)).tolist()
    return FirstChunk(runs, _ms(p50), _ms(p95), _ms(p99))


def time_streams(
    tts: TTS, request: BenchmarkRequest, chunk: int, streams: int, rounds: int
) -> Streaming:
    """Measures streams that begin at the same time.

    Args:
        tts: Warm, with at least as many slots as streams.
        request: Of each stream; every stream has a different seed.
        chunk: Frames per chunk.
        streams: Number of streams.
        rounds: Maximum number of rounds; no round begins after `_MAX_SECONDS`.
    """
    deadline_s = perf_counter() + _MAX_SECONDS
    timings: list[RequestTiming] = []
    arrivals: list[list[float]] = []
    with ThreadPoolExecutor(streams) as pool:
        for number in range(rounds):
            seeds = range(number * streams, (number + 1) * streams)
            round_timings = _time_round(pool, tts, request, chunk, seeds)
            timings += round_timings
            arrivals.append(sorted(1e3 * (t.first_s - t.start_s) for t in round_timings))
            if perf_counter() > deadline_s:
                break
    return Streaming(
        chunk,
        streams,
        len(arrivals),
        _ms(median(1e3 * (t.end_s - t.start_s) / t.frames for t in timings)),
        round(median((t.end_s - t.start_s) / t.audio_s for t in timings), 4),
        tuple(_ms(median(times)) for times in zip(*arrivals, strict=True)),
    )


def _time_round(
    pool: ThreadPoolExecutor, tts: TTS, request: BenchmarkRequest, chunk: int, seeds: Sequence[int]
) -> list[RequestTiming]:
    """Runs one stream per thread; all begin at a barrier."""
    barrier = Barrier(len(seeds))

    def time_stream(seed: int) -> RequestTiming:
        barrier.wait()
        return time_request(tts, request, chunk, seed)

    return list(pool.map(time_stream, seeds))


def _ms(milliseconds: float) -> float:
    """Rounded to microseconds."""
    return round(milliseconds, 3)
