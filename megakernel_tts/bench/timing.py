"""Times whole requests, from text to PCM, through the public API."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Literal, TypeVar

import numpy as np

from megakernel_tts import TTS, AudioChunk, ChunkPolicy, Sampling, SynthesisError, Voice
from megakernel_tts.bench.heap import frozen_heap
from megakernel_tts.bench.playback import PlaybackGaps

Chunks = TypeVar("Chunks")  # an iterator, or an asynchronous one

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


class _RequestTimer:
    """Times a request from its creation on, by the chunks that it is given."""

    def __init__(self) -> None:
        """Starts the clock."""
        self._playback = PlaybackGaps()
        self._frames = 0
        self._audio_s = 0.0
        self._first_s: float | None = None
        self._start_s = perf_counter()

    def add(self, chunk: AudioChunk) -> None:
        """Adds a chunk that has just come."""
        now_s = perf_counter()
        self._first_s = now_s if self._first_s is None else self._first_s
        self._frames += len(chunk.codes)
        chunk_s = len(chunk.pcm) / chunk.sample_rate
        self._audio_s += chunk_s
        self._playback.add(now_s, chunk_s)

    def end(self) -> RequestTiming:
        """Stops the clock.

        Raises:
            SynthesisError: The speech had no frames.
        """
        end_s = perf_counter()
        if self._first_s is None:
            raise SynthesisError("The speech ended before its first frame, so it cannot be timed.")
        gaps_s = tuple(self._playback.gaps_s)
        return RequestTiming(
            self._start_s, self._first_s, end_s, self._frames, self._audio_s, gaps_s
        )


def bind_request(
    stream: Callable[..., Chunks], request: BenchmarkRequest, chunk: int, seed: int
) -> Callable[[], Chunks]:
    """Gives `TTS.stream` or `TTS.astream` its arguments, without calling it.

    Args:
        stream: The method.
        request: The request.
        chunk: Frames per chunk.
        seed: Of the sampling.
    """
    return partial(
        stream,
        request.text,
        request.voice,
        instruct=request.instruct,
        layout=request.layout,
        sampling=replace(request.sampling, seed=seed),
        chunks=ChunkPolicy(chunk, chunk),
    )


def time_request(tts: TTS, request: BenchmarkRequest, chunk: int, seed: int) -> RequestTiming:
    """Times one request, which this thread reads.

    Args:
        tts: Warm.
        request: The request.
        chunk: Frames per chunk.
        seed: Of the sampling.

    Raises:
        SynthesisError: Synthesis failed, or the speech has no frames.
    """
    stream = bind_request(tts.stream, request, chunk, seed)
    timer = _RequestTimer()
    for audio_chunk in stream():
        timer.add(audio_chunk)
    return timer.end()


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
    """Measures streams that begin at the same time, read on one event loop as by a server.

    Args:
        tts: Warm, with at least as many slots as streams.
        request: Of each stream; every stream has a different seed.
        chunk: Frames per chunk.
        streams: Number of streams.
        rounds: Maximum number of rounds; no round begins after `_MAX_SECONDS`.

    Raises:
        SynthesisError: A request failed, or its speech has no frames; the others are cancelled.
    """
    with frozen_heap():
        timings_of_rounds = asyncio.run(_time_rounds(tts, request, chunk, streams, rounds))
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


async def _time_rounds(
    tts: TTS, request: BenchmarkRequest, chunk: int, streams: int, rounds: int
) -> list[list[RequestTiming]]:
    """Runs rounds, one after another; see `time_streams`."""
    deadline_s = perf_counter() + _MAX_SECONDS
    timings_of_rounds: list[list[RequestTiming]] = []
    for number in range(rounds):
        seeds = range(number * streams, (number + 1) * streams)
        timings_of_rounds.append(await _time_round(tts, request, chunk, seeds))
        if perf_counter() > deadline_s:
            break
    return timings_of_rounds


async def _time_round(
    tts: TTS, request: BenchmarkRequest, chunk: int, seeds: Sequence[int]
) -> list[RequestTiming]:
    """Runs one stream per task; all tasks begin in one iteration of the event loop.

    If a stream fails, those of the others end when `asyncio.run` cancels their tasks.
    """
    streams = [bind_request(tts.astream, request, chunk, seed) for seed in seeds]
    return await asyncio.gather(*map(_time_stream, streams))


async def _time_stream(stream: Callable[[], AsyncIterator[AudioChunk]]) -> RequestTiming:
    """As `time_request`, on an event loop.

    Args:
        stream: `TTS.astream` with its arguments.
    """
    timer = _RequestTimer()
    async for audio_chunk in stream():
        timer.add(audio_chunk)
    return timer.end()


def _ms(milliseconds: float) -> float:
    """Rounded to microseconds."""
    return round(milliseconds, 3)
