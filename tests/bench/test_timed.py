"""Requests over a simulated device take at least the device's time, and no extra device work."""

import time
from types import SimpleNamespace

import pytest

import bench.timed
from bench.timed import measure, measure_stages
from bench.timed_device import REQUEST_FRAMES, Times, timed_tts
from bench.timed_many import measure_many_streams
from megakernel_tts.engine.loop import Loop
from megakernel_tts.engine.stream import Stream

_LONG_S = 0.02  # longer than all work of the device that is queued
TIMES = Times(frame={1: 3.0, 8: 5.0}, prompt={8: 1.0}, codec={1: 1.0, 8: 2.0})


@pytest.mark.parametrize(("num_streams", "num_batches"), [(1, 2), (2, 3)])
def test_request_time_is_at_least_the_device_time(num_streams: int, num_batches: int) -> None:
    """A stream has eleven positions of its own: a full prefill batch, and three that share one."""
    tts, device = timed_tts(TIMES)
    with tts:
        tts.warmup()
        figures = measure(tts, device, num_streams, chunk=1, rounds=3)
    prompt, frame = TIMES.prompt_of(8), TIMES.frame_of(num_streams)
    codec = TIMES.codec_of(num_streams)
    assert len(figures.first_chunk) == num_streams
    assert min(figures.first_chunk) >= 2 * prompt + TIMES.frame_of(1) + TIMES.codec_of(1)
    if num_streams > 1:
        assert max(figures.first_chunk) >= num_batches * prompt + frame + codec
    assert figures.frame > figures.device >= frame + codec


def test_the_device_works_during_the_stages_in_which_the_host_waits() -> None:
    tts, device = timed_tts(TIMES)
    with tts:
        tts.warmup()
        stages = measure_stages(tts, device, runs=3)
    prompt, frame, codec = 2 * TIMES.prompt_of(8), TIMES.frame_of(1), TIMES.codec_of(1)
    assert stages.step_launched + stages.frame_read >= prompt + frame
    assert sum(vars(stages).values()) >= prompt + frame + codec
    assert min(vars(stages).values()) >= 0  # the moments are in the order of the stages
    assert min(stages.prefill_launched, stages.chunk_read) > 0


def test_each_request_comes_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr(bench.timed, "time", SimpleNamespace(sleep=pauses_s.append))
    tts, device = timed_tts(TIMES)
    with tts:
        tts.warmup()
        for pause_s in (0.0, 5.0):
            measure_stages(tts, device, 2, pause_s)
    assert pauses_s == [5.0, 5.0]


def test_the_device_is_busy_or_idle_from_the_first_launch_to_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Idle time counts for what the thread does; 64 streams are stepped together."""
    plan_chunks = Loop._plan_chunks

    def plan_slowly(loop: Loop) -> list[Stream]:
        time.sleep(_LONG_S)
        return plan_chunks(loop)

    monkeypatch.setattr(Loop, "_plan_chunks", plan_slowly)
    row = measure_many_streams(rounds=1)
    span = sum(row.device.values()) + sum(row.idle.values())
    assert span <= row.frame
    assert 0 < row.idle_share < 1 and next(iter(row.idle)) == "plan"
    assert row.launches["frames"] < REQUEST_FRAMES, "the streams began at different times"
