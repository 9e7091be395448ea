"""Stages of the time to the first chunk, measured by timers around the engine's calls.

The calls are wrapped only during the measurement. On a GPU the device is synchronised after each
stage, and pending codes are not decoded, so that work is attributed to the right stage. This makes
the requests slightly slower than those of `timing.time_first_chunk`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from threading import local
from time import perf_counter
from typing import Any

import torch

from megakernel_tts import TTS
from megakernel_tts.bench.timing import BenchmarkRequest, RequestTiming, time_request

_HOST_STAGES = ("tokenise", "prompt")


@dataclass(frozen=True)
class Stages:
    """Milliseconds of each stage until the first chunk; their sum is the time to the first chunk.

    Attributes:
        tokenise: From text to tokens.
        prompt: From voice and tokens to input vectors.
        prefill: The talker on the prompt.
        first_frame: The codes of the first frame.
        codec: From codes to 16-bit samples in host memory, with the copy.
        delivery: From the samples to the reading thread, with its wake-up.
        hand_over: Everything else: communication between threads, and the engine loop.
    """

    tokenise: float
    prompt: float
    prefill: float
    first_frame: float
    codec: float
    delivery: float
    hand_over: float


class StageTimer:
    """Accumulates the durations of the calls of each stage until the first chunk is decoded."""

    def __init__(self, synchronise: Callable[[], object]) -> None:
        self._synchronise = synchronise
        self._in_stage = local()  # `active`: nested calls belong to the outer stage
        self.restart()

    def restart(self) -> None:
        """Clears the measurement."""
        self._seconds: dict[str, float] = {}
        self._decoded_at_s = 0.0  # when the first chunk was decoded

    def wrap(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a call so that its duration is added to a stage."""

        @wraps(call)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._decoded_at_s or getattr(self._in_stage, "active", False):
                return call(*arguments, **keywords)
            self._in_stage.active = True
            start_s = perf_counter()
            try:
                result = call(*arguments, **keywords)
                if stage not in _HOST_STAGES:
                    self._synchronise()
            finally:
                self._in_stage.active = False
            end_s = perf_counter()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + end_s - start_s
            if stage == "codec":
                self._decoded_at_s = end_s
            return result

        return timed

    def read(self, timing: RequestTiming) -> Stages:
        """The stages of the request since the last restart."""
        seconds = self._seconds | {"delivery": timing.first_s - self._decoded_at_s}
        rest_s = timing.first_s - timing.start_s - sum(seconds.values())
        return Stages(**{stage: 1e3 * s for stage, s in seconds.items()}, hand_over=1e3 * rest_s)


@contextmanager
def stage_timer(tts: TTS) -> Iterator[StageTimer]:
    """Context that times the stages of a model's engine; the engine is restored afterwards."""
    loaded = tts._loaded
    engine = loaded.engine
    calls = (
        (loaded.tokenizer, ("normalize", "stable_length", "encode"), "tokenise"),
        (engine.prompt_builder, ("prefix", "build"), "prompt"),
        (engine.backend, ("prefill", "feed"), "prefill"),
        (engine.backend, ("step",), "first_frame"),
        (engine.vocoder, ("decode",), "codec"),
    )
    device = engine.prompt_builder.device
    on_gpu = device.type == "cuda"
    timer = StageTimer(partial(torch.cuda.synchronize, device) if on_gpu else lambda: None)
    methods = [(owner, name, stage) for owner, names, stage in calls for name in names]
    for owner, name, stage in methods:
        setattr(owner, name, timer.wrap(stage, getattr(owner, name)))
    max_pending_frames = engine.vocoder.max_pending_frames
    engine.vocoder.max_pending_frames = 0
    try:
        yield timer
    finally:
        for owner, name, _ in methods:
            delattr(owner, name)
        engine.vocoder.max_pending_frames = max_pending_frames


def measure_stages(
    tts: TTS, request: BenchmarkRequest, runs: int, done: Callable[[], object] = lambda: None
) -> Stages:
    """Measures the stages of the time to the first chunk; the mean of the middle half of the runs.

    Args:
        tts: Warm, without other streams.
        request: The request.
        runs: Number of requests.
        done: Called after each request.
    """
    results: list[Stages] = []
    with stage_timer(tts) as timer:
        for seed in range(runs):
            timer.restart()
            results.append(timer.read(time_request(tts, request, 1, seed)))
            done()
    results.sort(key=lambda stages: sum(vars(stages).values()))
    middle = results[len(results) // 4 : len(results) - len(results) // 4]
    means = {name: sum(vars(s)[name] for s in middle) / len(middle) for name in vars(middle[0])}
    return Stages(**{name: round(mean, 3) for name, mean in means.items()})
