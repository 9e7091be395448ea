"""Times per frame: every launch must make the frames by which its time is divided."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import frames
from bench.frames import FRAMES_PER_LAUNCH, check_num_frames, disable_end_of_speech, frame_ms
from tests.comparison import MakeComparison

SAMPLED = 0  # a stream of the comparison


class CountingKernel:
    """A backend whose launches make nothing but count; launch i makes `counts[i]` per stream."""

    def __init__(self, counts: Sequence[Sequence[int]]) -> None:
        self._counts = iter(counts)
        self._buffers = SimpleNamespace(num_published=np.zeros(8, np.int32))

    def _launch(self, slots: Sequence[int], num_frames: int) -> None:
        assert num_frames == FRAMES_PER_LAUNCH
        self._buffers.num_published[: len(slots)] = next(self._counts)


@pytest.fixture(autouse=True)
def _launches_take_64_ms(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def event_times(act: Callable[[], object], repeats: int) -> list[float]:
        return [64.0 for _ in range(repeats) if act() is None]

    if "gpu" not in request.keywords:
        monkeypatch.setattr(frames, "event_times", event_times)


def test_time_of_a_launch_is_divided_by_its_frames() -> None:
    kernel: Any = CountingKernel(100 * [(FRAMES_PER_LAUNCH, FRAMES_PER_LAUNCH)])
    assert frame_ms(kernel, [0, 1]) == 64.0 / FRAMES_PER_LAUNCH


@pytest.mark.parametrize("short_launch", [0, 1, 7])
@pytest.mark.parametrize("short_stream", [0, 1])
def test_every_launch_and_stream_must_make_all_frames(short_launch: int, short_stream: int) -> None:
    counts = [[FRAMES_PER_LAUNCH, FRAMES_PER_LAUNCH] for _ in range(8)]
    counts[short_launch][short_stream] -= 1
    kernel: Any = CountingKernel(counts)
    with pytest.raises(RuntimeError, match="A launch of 32 frames made"):
        frame_ms(kernel, [0, 1])


@pytest.mark.gpu
def test_speech_that_ends_is_refused_and_can_be_disabled(gpu_comparison: MakeComparison) -> None:
    comparison = gpu_comparison()
    kernel = comparison.kernel
    comparison.begin(0, SAMPLED)
    seen_codes = kernel._buffers.seen_codes.clone()
    kernel._launch([0], FRAMES_PER_LAUNCH)
    kernel._wait(FRAMES_PER_LAUNCH)
    check_num_frames(kernel, 1, FRAMES_PER_LAUNCH)
    (rows,) = kernel._collect(1, FRAMES_PER_LAUNCH)
    kernel._buffers.set_seen_codes(seen_codes)
    codes = rows[:, 1].tolist()
    last = next(i for i in range(2, len(codes)) if codes[i] not in codes[:i])
    kernel._buffers.params.eos_id = codes[last]
    with pytest.raises(RuntimeError, match=rf"made \[{last + 1}\] frames"):
        frame_ms(kernel, [0])
    disable_end_of_speech(kernel)
    assert frame_ms(kernel, [0]) > 0
