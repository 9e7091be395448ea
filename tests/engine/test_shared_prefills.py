"""Sessions that are opened together share prefills and begin together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megakernel_tts import AudioChunk, Session
from megakernel_tts.backends.protocol import PrefillRequest, PrefillResult
from megakernel_tts.engine.deadlines import DeadlineScheduler
from megakernel_tts.engine.scheduler import SchedulingPolicy
from tests.fakes import TIMEOUT_S
from tests.rig import MakeRig, Rig, codes, drain, read, scripted


def open_burst(rig: Rig, seeds: range) -> list[Session]:
    """Opens sessions during a step of another; the loop finds all of them in one iteration."""
    rig.backend.endless = True
    rig.backend.gate.clear()
    sessions = [rig.open(seed=0)]
    rig.hold()
    rig.backend.events.clear()
    sessions += [rig.open(seed=seed) for seed in seeds]
    rig.resume()
    for session in sessions:
        assert isinstance(next(iter(session)), AudioChunk)
    return sessions


def test_streams_opened_together_begin_together(make_rig: MakeRig) -> None:
    """After one frame each has its first chunk, also if a prefill of some prompts goes first."""
    rig = make_rig(6, first_prefill_positions=2)  # of ten, nine are common
    open_burst(rig, range(1, 6))
    assert rig.backend.prefill_sizes == [1, 2, 3]
    begun = rig.backend.events.index("prefill")
    assert begun == 1 and rig.backend.events[1:4] == ["prefill", "prefill", "frame"]
    assert rig.backend.prompts[1:] == [(seed, 0) for seed in range(1, 6)]


def test_speaking_streams_get_a_frame_after_the_prefill_budget(make_rig: MakeRig) -> None:
    rig = make_rig(6, first_prefill_positions=2, prefill_budget_positions=2)  # nine are common
    open_burst(rig, range(1, 6))
    assert rig.backend.prefill_sizes == [1, 2, 2, 1]
    prefills = [i for i, event in enumerate(rig.backend.events) if event == "prefill"]
    assert np.diff(prefills).tolist() == [2, 2], "one frame between them"


def test_no_burst_begins_beside_a_stream_that_speaks(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if it cannot make a frame, because it lacks text."""
    bursts = list[bool]()
    budget = DeadlineScheduler.prefill_budget

    def recorded(self: DeadlineScheduler, *arguments: Any, is_burst: bool) -> int:
        bursts.append(is_burst)
        return budget(self, *arguments, is_burst=is_burst)

    monkeypatch.setattr(DeadlineScheduler, "prefill_budget", recorded)
    rig = make_rig(2)
    live = rig.open(text=None)
    live.push_text("hello to the world, this ")
    assert isinstance(next(iter(live)), AudioChunk)
    assert bursts[0]
    rig.settle()
    bursts.clear()
    assert isinstance(next(iter(rig.open(seed=2))), AudioChunk)
    assert bursts and not any(bursts)


def test_a_prompt_that_fails_ends_no_other_stream(make_rig: MakeRig) -> None:
    rig = make_rig(6)
    rig.backend.failing_prompts = {13}
    rig.backend.endless = True
    rig.backend.gate.clear()
    speaking = rig.open(seed=0)
    rig.hold()
    sessions = [rig.open(seed=seed) for seed in (1, 13, 2)]
    rig.resume()
    finish = drain(sessions[1])[1]
    assert finish.reason == "error" and "failing prompt of seed 13" in str(finish.error)
    rig.backend.wait_until(lambda: rig.backend.prefill_sizes == [1, 1, 1])
    rig.backend.endless = False
    for seed, session in ((1, sessions[0]), (2, sessions[2])):
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(chunks), scripted(seed, finish.frames))
    assert drain(speaking)[1].reason == "eos"


def test_a_session_opened_during_a_prefill_begins_with_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first frame shares a step, and its codes are those of a stream alone."""
    prefill, second = rig.backend.prefill, list[Session]()

    def open_second(requests: Sequence[PrefillRequest], budget: int) -> PrefillResult:
        result = prefill(requests, budget)
        if not second:
            second.append(rig.open(seed=2))
        return result

    monkeypatch.setattr(rig.backend, "prefill", open_second)
    spoken = [drain(rig.open(seed=1))]
    spoken += map(drain, second)
    for seed, (chunks, finish) in enumerate(spoken, 1):
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.num_frames))
    assert rig.backend.events[:3] == ["prefill", "prefill", "frame"]
    assert rig.backend.batch_sizes[0] == 2


def test_a_session_cancelled_during_a_prefill_gets_no_prompt(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, cancelled = rig.backend.prefill, list[Session]()

    def open_and_cancel(requests: Sequence[PrefillRequest], budget: int) -> PrefillResult:
        result = prefill(requests, budget)
        if not cancelled:
            cancelled.append(rig.open(seed=2))
            cancelled[0].cancel()
        return result

    monkeypatch.setattr(rig.backend, "prefill", open_and_cancel)
    assert drain(rig.open(seed=1))[1].reason == "eos"
    assert drain(cancelled[0])[1].reason == "cancelled"
    assert rig.backend.prompts == [(1, 0)]


def test_a_stream_that_begins_waits_for_sessions_being_opened(make_rig: MakeRig) -> None:
    """The wait ends when the last of them is open, long before the join window does."""
    rig = make_rig(2, join_window_s=10 * TIMEOUT_S)
    with rig.engine.pending_open():
        first = rig.open(seed=1)
        rig.backend.wait_until(lambda: rig.backend.events == ["prefill"])
        second = rig.open(seed=2)
    assert {finish.reason for finish in read([first, second])} == {"eos"}
    assert rig.backend.batch_sizes[0] == 2


def test_a_stream_that_begins_waits_no_longer_than_the_join_window(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = rig.engine._loop.pending_opens
    wait, windows = pending.wait, list[float]()

    def record(timeout_s: float) -> None:
        windows.append(timeout_s)
        wait(timeout_s)

    monkeypatch.setattr(pending, "wait", record)
    with rig.engine.pending_open():
        assert read([rig.open()])[0].reason == "eos"
    assert set(windows) == {SchedulingPolicy().join_window_s}


def test_a_decoded_chunk_is_delivered_before_the_join_window(make_rig: MakeRig) -> None:
    rig = make_rig(3, join_window_s=10 * TIMEOUT_S)
    rig.backend.gate.clear()
    speaking = rig.open(seed=1, first=1, largest=1)
    rig.hold()
    with rig.engine.pending_open():
        other = rig.open(seed=2)
        rig.resume()
        assert isinstance(next(iter(speaking)), AudioChunk)
        rig.backend.wait_until(lambda: rig.backend.events.count("prefill") == 2)
        assert len(rig.backend.batch_sizes) == 1, "the loop is in the join window"
    assert {finish.reason for finish in read([speaking, other])} == {"eos"}
