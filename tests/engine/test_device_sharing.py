"""Short work of another engine on the backend's device goes first; codes do not change."""

import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from megakernel_common import device_arbiter
from megakernel_common.device_arbiter import ShortWork
from megakernel_tts import AudioChunk
from megakernel_tts.backends.protocol import Frames, PrefillRequest, PrefillResult
from megakernel_tts.engine.lock_pauses import LockPauses
from megakernel_tts.engine.stream import Stream
from tests.background import Background, Waits
from tests.fakes import TIMEOUT_S
from tests.rig import TEXT, MakeRig, Rig, codes, drain, scripted


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
    reading = Background(lambda: next(iter(session)))
    reading.join()
    assert isinstance(reading.result, AudioChunk)
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


def test_a_burst_of_prompts_ends_when_short_work_is_announced(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(num_slots=4, first_prefill_positions=1, prefill_budget_positions=1)
    waits, short, prefill = Waits(rig.arbiter), ShortWork(rig.arbiter), rig.backend.prefill
    begun, announced = list[Background](), threading.Event()

    def announce(requests: Sequence[PrefillRequest], budget: int | None = None) -> PrefillResult:
        if not begun:
            begun.append(Background(short.begin))
            waits.next()
            announced.set()
        return prefill(requests, budget)

    monkeypatch.setattr(rig.backend, "prefill", announce)
    sessions = [rig.open(None, seed=seed) for seed in range(3)]
    with rig.paused():
        for session in sessions:
            session.push_text(TEXT)
            session.end()
    assert announced.wait(TIMEOUT_S)
    waits.next()  # the engine's thread, at the next prompt
    begun[0].join()
    assert rig.backend.events == ["prefill", "frame"]
    short.end()
    for seed, session in enumerate(sessions):
        np.testing.assert_array_equal(codes(drain(session)[0]), scripted(seed, rig.num_frames))


def test_recognition_gets_the_interpreter_lock_after_a_step(
    loud_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, waiting = list[bool](), ShortWork(loud_rig.arbiter)
    pause = LockPauses.pause_always

    def observed(self: LockPauses) -> None:
        pauses.append(bool(loud_rig.arbiter.short))
        pause(self)

    monkeypatch.setattr(LockPauses, "pause_always", observed)
    waits = Waits(loud_rig.arbiter)
    loud_rig.backend.gate.clear()
    session = loud_rig.open(seed=4)
    loud_rig.hold()
    assert not pauses, "with few streams there are no pauses"
    beginning = Background(waiting.begin)
    waits.next()
    loud_rig.resume()
    beginning.join()
    waiting.end()
    drain(session)
    assert pauses and pauses[0]


def test_the_device_is_free_after_a_defect(loud_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the loop, while prompts run."""
    monkeypatch.setattr(loud_rig.engine._loop.scheduler, "note_waiting", lambda: 1 / 0)
    session = loud_rig.open(seed=4, at_once=True)
    assert drain(session)[1].reason == "error"
    loud_rig.engine.close()
    assert not loud_rig.arbiter.long


def test_the_device_is_free_after_the_engine_is_closed(loud_rig: Rig) -> None:
    loud_rig.backend.endless = True
    session = loud_rig.open(seed=4)
    next(iter(session))
    loud_rig.engine.close()
    assert not loud_rig.arbiter.long
