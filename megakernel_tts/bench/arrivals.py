"""Requests that arrive at random times, as those of a service do, read on an event loop."""

import asyncio
import random
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from megakernel_tts import TTS, EngineBusyError
from megakernel_tts.bench.heap import frozen_heap
from megakernel_tts.bench.playback import PlaybackGaps
from megakernel_tts.bench.timing import BenchmarkRequest

_MAX_FRAMES = 50  # 4 s


@dataclass(frozen=True)
class Arrivals:
    """Figures of requests with independent, random times of arrival (a Poisson process).

    Attributes:
        rate: Requests per second.
        duration_s: Seconds in which requests arrive.
        requests: Number of requests.
        refused: Requests that the engine refused, because too many were waiting for a slot.
        max_concurrent: Requests that were open at the same time at most.
        first_chunk_ms_p50: Median time from the arrival of a request to its first chunk.
        first_chunk_ms_p95: 95th percentile of it.
        first_chunk_ms_p99: 99th percentile of it.
        underruns: Late chunks, if each stream is played from its first chunk on.
        streams_with_underruns: Streams with a late chunk.
        longest_gap_ms: Longest time without audio before a late chunk.
        audio_seconds_per_second: Seconds of audio, divided by the time until the last was there.
    """

    rate: float
    duration_s: float
    requests: int
    refused: int
    max_concurrent: int
    first_chunk_ms_p50: float
    first_chunk_ms_p95: float
    first_chunk_ms_p99: float
    underruns: int
    streams_with_underruns: int
    longest_gap_ms: float
    audio_seconds_per_second: float


class _Run:
    """Requests under way, and what they received."""

    def __init__(self, tts: TTS, request: BenchmarkRequest) -> None:
        self.first_chunks_s: list[float] = []
        self.playbacks: list[PlaybackGaps] = []
        self.audio_s = 0.0
        self.num_refused = 0
        self.max_concurrent = 0
        self._num_concurrent = 0
        self._tts = tts
        self._request = request

    async def open_all(self, rate: float, duration_s: float) -> None:
        """Opens requests until the time is over, and reads them to their ends."""
        rng, seed = random.Random(0), 0
        start_s = perf_counter()
        due_s = rng.expovariate(rate)
        async with asyncio.TaskGroup() as tasks:
            while due_s < duration_s:
                await asyncio.sleep(max(0.0, start_s + due_s - perf_counter()))
                tasks.create_task(self._read(seed, start_s + due_s))
                seed, due_s = seed + 1, due_s + rng.expovariate(rate)

    async def _read(self, seed: int, arrived_s: float) -> None:
        """Reads one request, which has arrived at `arrived_s` of `perf_counter`."""
        request, playback = self._request, PlaybackGaps()
        self._num_concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self._num_concurrent)
        chunks = self._tts.astream(
            request.text,
            request.voice,
            instruct=request.instruct,
            layout=request.layout,
            sampling=replace(request.sampling, seed=seed),
        )
        is_first = True
        try:
            async for chunk in chunks:
                now_s, chunk_s = perf_counter(), len(chunk.pcm) / chunk.sample_rate
                if is_first:
                    self.first_chunks_s.append(now_s - arrived_s)
                    is_first = False
                playback.add(now_s, chunk_s)
                self.audio_s += chunk_s
        except EngineBusyError:
            self.num_refused += 1
        self.playbacks.append(playback)
        self._num_concurrent -= 1


def measure_arrivals(
    tts: TTS, request: BenchmarkRequest, rate: float, duration_s: float
) -> Arrivals:
    """Measures requests that arrive at random; chunks grow as in a service.

    Args:
        tts: Warm.
        request: Of each stream, which is cut after four seconds; every stream has a different seed.
        rate: Requests per second.
        duration_s: Seconds in which requests arrive; at least one does.
    """
    sampling = replace(request.sampling, max_frames=_MAX_FRAMES)
    run = _Run(tts, replace(request, sampling=sampling))
    start_s = perf_counter()
    with frozen_heap():
        asyncio.run(run.open_all(rate, duration_s))
    elapsed_s = perf_counter() - start_s
    gaps_s = [gap for playback in run.playbacks for gap in playback.gaps_s]
    p50, p95, p99 = (
        np.percentile(run.first_chunks_s, (50, 95, 99)).tolist()
        if run.first_chunks_s
        else (0.0, 0.0, 0.0)
    )
    return Arrivals(
        rate=rate,
        duration_s=duration_s,
        requests=len(run.playbacks),
        refused=run.num_refused,
        max_concurrent=run.max_concurrent,
        first_chunk_ms_p50=round(1e3 * p50, 3),
        first_chunk_ms_p95=round(1e3 * p95, 3),
        first_chunk_ms_p99=round(1e3 * p99, 3),
        underruns=len(gaps_s),
        streams_with_underruns=sum(bool(playback.gaps_s) for playback in run.playbacks),
        longest_gap_ms=round(1e3 * max(gaps_s, default=0.0), 3),
        audio_seconds_per_second=round(run.audio_s / elapsed_s, 2),
    )
