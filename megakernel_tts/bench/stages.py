"""What the time to the first chunk consists of: a stopwatch around the engine's own calls.

The calls are wrapped while the stopwatch is on, and are their own again afterwards: it costs
nothing when off. On a GPU what a stage has begun is awaited before the next one begins, and nothing
is decoded before its frames are known, so that each stage has its own work; that makes these
requests a little slower than those of `timing.first_chunk`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from threading import local
from time import perf_counter
from typing import Any

import torch

from megakernel_tts.bench.timing import Request, Timing, speak
from megakernel_tts.tts import TTS

_ON_HOST = ("tokenise", "prompt")


@dataclass(frozen=True)
class Stages:
    """Milliseconds of each stage until the first chunk; they add up to its time.

    Attributes:
        tokenise: The text to tokens.
        prompt: The voice's prefix and the tokens to input vectors.
        prefill: The prompt through the talker.
        first_frame: The first frame's codes.
        codec: The codes to 16-bit samples in host memory; the copy is part of it.
        delivery: The samples to the thread that reads them, which wakes up.
        hand_over: The rest: from thread to thread, and the loop's own work.
    """

    tokenise: float
    prompt: float
    prefill: float
    first_frame: float
    codec: float
    delivery: float
    hand_over: float


class _Stopwatch:
    """Adds up what the calls of each stage take, until the first chunk is decoded."""

    def __init__(self, settle: Callable[[], object]) -> None:
        self._settle = settle
        self._inside = local()  # whether this thread is in a stage: calls within it belong to it
        self.restart()

    def restart(self) -> None:
        """Forgets what it has measured."""
        self._seconds: dict[str, float] = {}
        self._decoded = 0.0  # when the first chunk was

    def wrap(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._decoded or getattr(self._inside, "now", False):
                return call(*arguments, **named)
            self._inside.now = True
            start = perf_counter()
            try:
                result = call(*arguments, **named)
                if stage not in _ON_HOST:
                    self._settle()
            finally:
                self._inside.now = False
            end = perf_counter()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + end - start
            if stage == "codec":
                self._decoded = end
            return result

        return timed

    def read(self, timing: Timing) -> Stages:
        """The stages of the request that it has seen."""
        seconds = self._seconds | {"delivery": timing.first - self._decoded}
        rest = timing.first - timing.start - sum(seconds.values())
        return Stages(**{stage: 1e3 * s for stage, s in seconds.items()}, hand_over=1e3 * rest)


@contextmanager
def _watch(tts: TTS) -> Iterator[_Stopwatch]:
    """A stopwatch around the calls of this model's engine."""
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
    watch = _Stopwatch(partial(torch.cuda.synchronize, device) if on_gpu else lambda: None)
    places = [(owner, name, stage) for owner, names, stage in calls for name in names]
    for owner, name, stage in places:
        setattr(owner, name, watch.wrap(stage, getattr(owner, name)))
    engine.vocoder.max_pending_frames, expected = 0, engine.vocoder.max_pending_frames
    try:
        yield watch
    finally:
        for owner, name, _ in places:
            delattr(owner, name)
        engine.vocoder.max_pending_frames = expected


def first_chunk_stages(
    tts: TTS, request: Request, runs: int, done: Callable[[], object] = lambda: None
) -> Stages:
    """The stages of the time to the first chunk: the mean of the middle half of the runs.

    Args:
        tts: Warm, and used by nobody else meanwhile.
        request: What is said.
        runs: How often.
        done: Called after every one.
    """
    found: list[Stages] = []
    with _watch(tts) as watch:
        for seed in range(runs):
            watch.restart()
            found.append(watch.read(speak(tts, request, 1, seed)))
            done()
    found.sort(key=lambda stages: sum(vars(stages).values()))
    middle = found[len(found) // 4 : len(found) - len(found) // 4]
    means = {name: sum(vars(s)[name] for s in middle) / len(middle) for name in vars(middle[0])}
    return Stages(**{name: round(mean, 3) for name, mean in means.items()})
