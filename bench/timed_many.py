"""64 streams over a simulated device: how long it is idle, and what the host does meanwhile."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from statistics import mean
from typing import Any
from unittest.mock import patch

from bench.timed_device import (
    REQUEST_FRAMES,
    SimulatedDevice,
    TimedCodec,
    TimedKernel,
    Times,
    timed_tts,
)
from megakernel_common.wakeup import Wakeup
from megakernel_tts import TTS
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.bench.timing import BenchmarkRequest, time_streams
from megakernel_tts.engine.decoding import DecodePipeline
from megakernel_tts.engine.loop import Loop

_STREAMS, _CHUNK_FRAMES = 64, 4
_TEXT = "Hello, it is good to hear you."
# The 0.6B size on an H100: bench/results/wide-h100.json and bench/results/codec-h100.json. Batches
# of prompts are those of an H200: docs/design-notes/prefill.md.
_FRAME_MS = {1: 1.311, 8: 1.858, 16: 2.016, 32: 2.701, 64: 4.435}
_PROMPT_MS = {2: 0.35, 8: 0.46, 9: 0.62, 12: 0.65, 16: 0.72}
_CODEC_MS = {1: 0.325, 8: 0.772, 16: 1.244, 32: 1.997, 64: 1.986, 128: 3.626, 256: 6.693}
_NO_WORK = "no work"
# Activities of the engine thread; time within another one counts for that one only.
_ACTIVITIES: tuple[tuple[type, str, str], ...] = (
    (Wakeup, "wait", _NO_WORK),
    (Loop, "_iterate", "other"),
    (Loop, "_end_segments", "ended streams"),
    (Loop, "_feed_or_finish", "text"),
    (Loop, "_admit", "prompts"),
    (Loop, "_plan_chunks", "plan"),
    (Loop, "_step_until_due", "plan"),
    (Loop, "_step", "frames added"),
    (Loop, "_beside_device_work", "text and pause beside the step"),
    (Megakernel, "step", "frames read"),
    (Megakernel, "_launch", "launch of frames"),
    (TimedKernel, "_wait", "wake-up after frames"),
    (TimedCodec, "_collect", "samples"),
    (DecodePipeline, "begin_early", "codec's requests"),
    (DecodePipeline, "confirm_early", "codec's state"),
    (DecodePipeline, "decode", "codec's requests"),
    (DecodePipeline, "deliver", "delivery"),
)


@dataclass(frozen=True)
class ManyStreams:
    """Streams that start together; milliseconds are per frame of all streams.

    Means of the fastest quarter of the rounds.

    Attributes:
        streams: Number of streams.
        chunk_frames: Frames of every chunk.
        frame: From the first request to the last chunk.
        audio_seconds_per_second: Throughput.
        last_first_chunk: Milliseconds to the first chunk of the stream that is served last.
        device: Work of the device, by kind.
        launches: Launches of a round, by kind; neighbouring prefill batches are one.
        engine_thread: CPU time of the engine thread.
        idle_share: Share of the time from the first work to the last in which there was none.
        idle: The same as time, by what the engine thread did.
    """

    streams: int
    chunk_frames: int
    frame: float
    audio_seconds_per_second: float
    last_first_chunk: float
    device: dict[str, float]
    launches: dict[str, float]
    engine_thread: float
    idle_share: float
    idle: dict[str, float]


@contextmanager
def _record_activities(device: SimulatedDevice) -> Iterator[None]:
    """Records in the device what the engine thread does."""

    def recorded(function: Callable[..., Any], activity: str) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            left = device.enter(activity)
            try:
                return function(*args, **kwargs)
            finally:
                device.enter(left)

        return run

    with ExitStack() as patches:
        for owner, name, activity in _ACTIVITIES:
            function = recorded(getattr(owner, name), activity)
            patches.enter_context(patch.object(owner, name, function))
        yield


def measure_many_streams(rounds: int = 16) -> ManyStreams:
    """Measures rounds of streams.

    Args:
        rounds: Number of rounds.
    """
    tts, device = timed_tts(Times(_FRAME_MS, _PROMPT_MS, _CODEC_MS), _STREAMS)
    with tts, _record_activities(device):
        tts.warmup()
        measured = [_measure_round(tts, device) for _ in range(rounds)]
    fastest = sorted(measured, key=lambda row: row["frame"])[: max(1, rounds // 4)]
    names = {name for row in fastest for name in row}
    means = {name: mean(row.get(name, 0.0) for row in fastest) for name in sorted(names)}

    def group(kind: str) -> dict[str, float]:
        """The figures whose names begin with a kind, the largest first."""
        found = {k.removeprefix(kind): round(v, 3) for k, v in means.items() if k.startswith(kind)}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    idle_ms, busy_ms = sum(group("idle ").values()), sum(group("device ").values())
    return ManyStreams(
        _STREAMS,
        _CHUNK_FRAMES,
        round(means["frame"], 3),
        round(means["throughput"], 1),
        round(means["last first chunk"], 1),
        group("device "),
        group("launches "),
        round(means["engine thread"], 3),
        round(idle_ms / (idle_ms + busy_ms), 3),
        group("idle "),
    )


def _measure_round(tts: TTS, device: SimulatedDevice) -> dict[str, float]:
    """Times one round of streams; returns the figures by name."""
    request = BenchmarkRequest(_TEXT, tts.sampling, next(iter(tts.voices)))
    engine_clock = time.pthread_getcpuclockid(tts._loaded.engine._thread.ident or 0)
    device.busy_s.clear()
    device.num_launches.clear()
    device.idle_s.clear()
    begin_s = time.clock_gettime(engine_clock)
    result = time_streams(tts, request, _CHUNK_FRAMES, _STREAMS, rounds=1)
    engine_s = time.clock_gettime(engine_clock) - begin_s
    seconds = {f"device {kind}": busy_s for kind, busy_s in device.busy_s.items()}
    seconds |= {f"idle {name}": s for name, s in device.idle_s.items() if name != _NO_WORK}
    seconds["engine thread"] = engine_s
    figures = {name: 1e3 * value / REQUEST_FRAMES for name, value in seconds.items()}
    figures |= {f"launches {kind}": count for kind, count in device.num_launches.items()}
    return figures | {
        "frame": 1e3 * _STREAMS / result.frames_per_second,
        "throughput": result.audio_seconds_per_second,
        "last first chunk": result.first_chunk_ms[-1],
    }
