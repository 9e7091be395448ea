"""Short work of another engine on the backend's device goes first; codes do not change."""

import random

import numpy as np
import pytest

from megakernel_common import device_arbiter
from megakernel_common.device_arbiter import ShortWork
from megakernel_tts import AudioChunk
from megakernel_tts.backends.protocol import Frames
from megakernel_tts.engine.stream import Stream
from tests.background import Background, Waits
from tests.fakes import TIMEOUT_S
from tests.rig import Rig, codes, drain, scripted


@pytest.fixture(autouse=True)
def _unlimited_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits end only when the device is free."""
    monkeypatch.setattr(device_arbiter, "_MAX_WAIT_S", TIMEOUT_S)


def test_short_work_ends_a_step_with_the_frame_under_way(loud_rig: Rig) -> None:
    waits, short = Waits(loud_rig.arbiter), ShortWork(loud_rig.arbiter)
    made = loud_rig.backend.batch_sizes
    loud_rig.backend.gate.clear()
    session = loud_rig.open(seed=4, first=100, largest=100)
    loud_rig.hold()
    assert loud_rig.backend.step_lengths[0] > 1
    beginning = Background(short.begin)
    waits.next()
    loud_rig.resume()
    beginning.join()
    waits.next()  # the engine's thread, at its next step
    assert len(made) == 1
    short.end()
    chunks, _ = drain(session)
    np.testing.assert_array_equal(codes(chunks), scripted(4, loud_rig.num_frames))


def test_a_chunk_is_delivered_while_short_work_goes_first(loud_rig: Rig) -> None:
    waits, short = Waits(loud_rig.arbiter), ShortWork(loud_rig.arbiter)
    loud_rig.backend.gate.clear()
    session = loud_rig.open(seed=4, first=1, largest=8)
    loud_rig.hold()
    beginning = Background(short.begin)
    waits.next()
    loud_rig.resume()
    beginning.join()
    assert isinstance(next(iter(session)), AudioChunk)
    assert len(loud_rig.backend.batch_sizes) == 1, "the next frame waits"
    short.end()
    assert codes(drain(session)[0]).shape[0] == loud_rig.num_frames - 1


def test_a_prompt_waits_for_short_work(loud_rig: Rig) -> None:
    waits, short = Waits(loud_rig.arbiter), ShortWork(loud_rig.arbiter)
    short.begin()
    session = loud_rig.open(seed=4)
    waits.next()
    assert not loud_rig.backend.events
    short.end()
    assert codes(drain(session)[0]).shape[0] == loud_rig.num_frames


def test_no_frame_is_made_beside_short_work(loud_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short work comes at random times, from two threads."""
    rng, made = random.Random(0), loud_rig.backend.batch_sizes
    works: list[Background] = []

    def work() -> bool:
        short = ShortWork(loud_rig.arbiter)
        short.begin()
        num_made = len(made)
        undisturbed = all(len(made) == num_made for _ in range(1000))
        short.end()
        return undisturbed

    def begin_at_random() -> None:
        if rng.random() < 0.5:
            works.extend(Background(work) for _ in range(2))

    monkeypatch.setattr(loud_rig.backend, "_pass_gate", begin_at_random)
    sessions = [loud_rig.open(seed=seed, first=8, largest=8) for seed in range(2)]
    for seed, session in enumerate(sessions):
        np.testing.assert_array_equal(codes(drain(session)[0]), scripted(seed, loud_rig.num_frames))
    assert len(works) > 5
    for one in works:
        one.join()
        assert one.result is True
    assert loud_rig.idle() and not loud_rig.arbiter.long


def test_short_work_without_end_slows_down_and_does_not_stop(
    loud_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_arbiter, "_MAX_WAIT_S", 0.0)
    ShortWork(loud_rig.arbiter).begin()
    chunks, _ = drain(loud_rig.open(seed=4, first=100, largest=100))
    np.testing.assert_array_equal(codes(chunks), scripted(4, loud_rig.num_frames))
    assert len(loud_rig.backend.step_lengths) == len(loud_rig.backend.batch_sizes)


def test_recognition_does_not_wait_for_the_host_after_a_step(
    loud_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: list[bool] = []
    add_frames = Stream.add_frames

    def observed(self: Stream, frames: Frames, now_s: float) -> None:
        free.append(not loud_rig.arbiter.long)
        add_frames(self, frames, now_s)

    monkeypatch.setattr(Stream, "add_frames", observed)
    drain(loud_rig.open(seed=4))
    assert free and all(free)


def test_the_device_is_free_after_a_prompt_that_failed(loud_rig: Rig) -> None:
    loud_rig.backend.failing_prompts = {4}
    assert drain(loud_rig.open(seed=4))[1].reason == "error"
    assert loud_rig.idle() and not loud_rig.arbiter.long


def test_the_device_is_free_after_the_engine_is_closed(loud_rig: Rig) -> None:
    loud_rig.backend.endless = True
    session = loud_rig.open(seed=4)
    next(iter(session))
    loud_rig.engine.close()
    assert not loud_rig.arbiter.long
