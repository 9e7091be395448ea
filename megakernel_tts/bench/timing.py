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
from megakernel_tts.bench.playback import PlaybackGaps

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
        gaps_s: Seconds by which chunks came after the audio before them had been played, if
            playback begins with the first chunk; of late chunks only.
    """

    start_s: float
    first_s: float
    end_s: float
    frames: int
    audio_s: float
    gaps_s: tuple[float, ...] = ()


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
        frames_per_second: Frames of all streams of a round divided by its duration, median.
        audio_seconds_per_second: Seconds of audio of all streams, divided in the same way.
        underruns: Late chunks of all rounds, if each stream is played from its first chunk on.
    """

    chunk_frames: int
    streams: int
    rounds: int
    ms_per_frame: float
    real_time_factor: float
    first_chunk_ms: tuple[float, ...]
    frames_per_second: float
    audio_seconds_per_second: float
    underruns: int


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
    frames, audio_s, first_s, playback = 0, 0.0, None, PlaybackGaps()
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
        chunk_s = len(audio_chunk.pcm) / audio_chunk.sample_rate
        audio_s += chunk_s
        playback.add(end_s, chunk_s)
    if first_s is None:
        raise SynthesisError("The speech ended before its first frame, so it cannot be timed.")
    return RequestTiming(start_s, first_s, perf_counter(), frames, audio_s, tuple(playback.gaps_s))


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
    timings_of_rounds: list[list[RequestTiming]] = []
    with ThreadPoolExecutor(streams) as pool:
        for number in range(rounds):
            seeds = range(number * streams, (number + 1) * streams)
            timings_of_rounds.append(_time_round(pool, tts, request, chunk, seeds))
            if perf_counter() > deadline_s:
                break
    timings = [timing for round_timings in timings_of_rounds for timing in round_timings]
    first_chunks = [
        sorted(1e3 * (t.first_s - t.start_s) for t in round_timings)
        for round_timings in timings_of_rounds
    ]
    return Streaming(
        chunk,
        streams,
        len(timings_of_rounds),
        _ms(median(1e3 * (t.end_s - t.start_s) / t.frames for t in timings)),
        round(median((t.end_s - t.start_s) / t.audio_s for t in timings), 4),
        tuple(_ms(median(times)) for times in zip(*first_chunks, strict=True)),
        round(median(_per_second(r, sum(t.frames for t in r)) for r in timings_of_rounds), 1),
        round(median(_per_second(r, sum(t.audio_s for t in r)) for r in timings_of_rounds), 2),
        sum(len(timing.gaps_s) for timing in timings),
    )


def _per_second(round_timings: Sequence[RequestTiming], amount: float) -> float:
    """An amount divided by the time from the first start to the last end of a round."""
    begin_s = min(timing.start_s for timing in round_timings)
    return amount / (max(timing.end_s for timing in round_timings) - begin_s)


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
