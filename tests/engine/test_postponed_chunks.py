"""Chunks that are due are decoded behind the first chunk of another stream, if they can wait."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megakernel_tts import AudioChunk, Session
from megakernel_tts.codec.decoder import DecodeRequest
from megakernel_tts.codec.vocoder import PendingSamples
from megakernel_tts.engine.deadlines import DeadlineScheduler
from megakernel_tts.engine.scheduler import Scheduler
from megakernel_tts.engine.stream import Stream
from megakernel_tts.engine.work_times import IterationWork
from tests.rig import UNLIMITED, MakeRig, Rig, codes, drain, scripted


def _open(rig: Rig, seed: int, priority: int = 0) -> Session:
    """Opens a stream with chunks of one frame, each of which is due after every step."""
    return rig.open(seed=seed, first=1, largest=1, ahead=UNLIMITED, priority=priority, at_once=True)


def _speaking(rig: Rig, count: int, priority: int = 0) -> list[Session]:
    """Opens streams, which are stopped in a step, and of which one chunk is not begun early."""
    rig.engine.vocoder.max_pending_total = max(1, count - 1)
    sessions = [_open(rig, seed, priority) for seed in range(count)]
    for session in sessions:
        next(iter(session))
    rig.hold()
    return sessions


def _record_decoding(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Returns a dictionary that receives the slots in the order of their first decoding.

    The values are the frames that the backend had made.
    """
    decoded, decode = dict[int, int](), rig.engine.vocoder.decode

    def record(requests: Sequence[DecodeRequest]) -> PendingSamples:
        with rig.backend._recorded:
            for request in requests:
                decoded.setdefault(request.slot, len(rig.backend.batch_sizes))
            rig.backend._recorded.notify_all()
        return decode(requests)

    monkeypatch.setattr(rig.engine.vocoder, "decode", record)
    return decoded


@pytest.mark.parametrize(
    ("num_speaking", "num_slots", "late_by_s", "is_postponed"),
    [(2, 3, 0, True), (23, 24, 0, True), (24, 25, 0, False), (2, 3, 60, False), (2, 2, 0, False)],
    ids=["few", "many", "too many", "late", "no slot for the new stream"],
)
def test_a_chunk_that_can_wait_is_decoded_behind_the_first_of_another_stream(
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    num_speaking: int,
    num_slots: int,
    late_by_s: float,
    is_postponed: bool,
) -> None:
    rig = make_rig(num_slots)
    rig.backend.endless = True
    speaking = _speaking(rig, num_speaking)
    decoded = _record_decoding(rig, monkeypatch)
    rig.advance(late_by_s)
    other = _open(rig, seed=99)
    rig.resume()
    left_out, new = num_speaking - 1, num_slots - 1
    rig.backend.wait_until(lambda: left_out in decoded)
    before = [*decoded][: [*decoded].index(left_out)]
    assert (new in before) is is_postponed
    for session in (*speaking, other):
        session.cancel()


def test_of_few_streams_it_is_decoded_between_the_first_chunk_and_the_next_step(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of the first chunk has woken up by then."""
    rig = make_rig(4)
    rig.backend.endless = True
    speaking = _speaking(rig, 2)
    decoded, before = _record_decoding(rig, monkeypatch), list[list[int]]()
    pauses = rig.engine._loop._pauses
    monkeypatch.setattr(pauses, "pause_for_reader", lambda: before.append([*decoded]))
    other = _open(rig, seed=99)
    rig.resume()
    rig.backend.wait_until(lambda: 1 in decoded)
    assert 2 in before[0] and 1 not in before[0]
    assert decoded[1] == decoded[2]
    for session in (*speaking, other):
        session.cancel()


def test_a_stream_whose_chunk_was_postponed_may_lose_its_slot(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of higher priority arrives while the stream that took the last slot begins."""
    rig = make_rig(3)
    lower = _speaking(rig, 2, priority=2)
    sessions, step = [*lower, _open(rig, seed=2, priority=1)], rig.backend.step

    def step_and_open(slots: Sequence[int], *arguments: Any) -> object:
        if len(slots) == 1 and len(sessions) == 3:  # the first frame of the third stream
            sessions.append(_open(rig, seed=3))
        if rig.backend.num_swapped_out:
            rig.clock.now_s += 1  # chunks cannot wait any more
        return step(slots, *arguments)

    monkeypatch.setattr(rig.backend, "step", step_and_open)
    rig.resume()
    for seed, session in enumerate(sessions):
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        read = len(codes(chunks))
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.num_frames)[-read:])
    assert len(sessions) == 4 and rig.backend.num_swapped_out


def _before_frames(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    slot: int,
    frames: Sequence[int],
    action: Callable[[], object],
) -> list[int]:
    """Does something before steps that begin with these frames of a stream.

    Returns:
        A list that receives the lengths of these steps, and of those behind the first of them.
    """
    lengths, step = list[int](), rig.backend.step

    def observed(slots: Sequence[int], num_frames: int, *arguments: Any) -> object:
        if slot in slots and rig.backend.num_frames(slot) in frames:
            action()
        if lengths or rig.backend.interrupted:
            lengths.append(num_frames)
        return step(slots, num_frames, *arguments)

    monkeypatch.setattr(rig.backend, "step", observed)
    return lengths


def test_a_chunk_of_a_stream_that_makes_no_more_frames_waits_for_no_other_step(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream for which it was postponed does not begin: its prompt fails."""
    rig = make_rig(3)
    rig.backend.runaway, rig.backend.failing_prompts = {1}, {99}
    rig.engine.vocoder.max_pending_frames = 0
    rig.backend.gate.clear()
    other = rig.open(seed=1, first=1, largest=8, ahead=UNLIMITED, at_once=True)
    short = rig.open(seed=0, first=1, largest=1, ahead=UNLIMITED, max_frames=2, at_once=True)
    begun = list[Session]()
    _before_frames(rig, monkeypatch, 1, [1], lambda: begun.append(_open(rig, seed=99)))
    made, decode = list[tuple[int, int]](), rig.engine.vocoder.decode

    def record(requests: Sequence[DecodeRequest]) -> PendingSamples:
        made.extend((request.slot, len(rig.backend.batch_sizes)) for request in requests)
        return decode(requests)

    monkeypatch.setattr(rig.engine.vocoder, "decode", record)
    deadlines, seeds = rig.engine._loop.scheduler.deadlines, list[set[int | None]]()
    prefill_budget = deadlines.prefill_budget

    def record_streams(streams: Sequence[Stream], now_s: float, *, is_burst: bool) -> int:
        seeds.append({stream.request.sampling.seed for stream in streams})
        return prefill_budget(streams, now_s, is_burst=is_burst)

    monkeypatch.setattr(deadlines, "prefill_budget", record_streams)
    rig.resume()
    assert [len(chunk.codes) for chunk in drain(short)[0]] == [1, 1]
    frames = [count for slot, count in made if slot == 1]
    assert frames[1] == frames[0] + 1, "decoded in the order of the frames"
    assert {0, 1} in seeds, "its deadline limits the prefill"
    assert drain(begun[0])[1].reason == "error"
    other.cancel()


def test_the_step_behind_a_postponed_chunk_is_planned_anew(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the next chunk, which has twice as many frames."""
    rig = make_rig(3)
    rig.backend.runaway, rig.backend.failing_prompts = {0}, {99}
    rig.engine.vocoder.max_pending_frames = 0
    rig.backend.gate.clear()
    others = list[Session]()
    session = rig.open(seed=0, first=1, largest=8, ahead=UNLIMITED, at_once=True)
    # The second chunk has two frames, each of which is made in a step that another stream ends.
    lengths = _before_frames(rig, monkeypatch, 0, [1, 2], lambda: others.append(_open(rig, 99)))
    rig.resume()
    chunks = [next(iter(session)) for _ in range(4)]
    assert [len(chunk.codes) for chunk in chunks if isinstance(chunk, AudioChunk)] == [1, 2, 4, 8]
    assert lengths[:4] == [2, 1, 4, 8] and len(others) == 2
    session.cancel()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"_free_slots": []}, False),
        ({"_slot_lacks_memory": True}, False),
        ({"_frame_lacks_memory": True}, False),
        ({"waiting": []}, True),
        ({"waiting": [], "few_open": False}, False),
        ({"few_open": False}, True),
        ({"waiting": [], "first_chunk": False}, False),
        ({"first_chunk": False}, True),
        ({"movable": []}, False),
        ({"due": []}, False),
        ({"can_postpone": False}, False),
    ],
    ids=str,
)
def test_chunks_wait_only_if_an_iteration_follows_that_can_decode_them(
    changed: dict[str, Any], expected: bool
) -> None:
    state: dict[str, Any] = {
        "_free_slots": [0], "_slot_lacks_memory": False, "_frame_lacks_memory": False,
        "waiting": ["stream"], "few_open": True, "first_chunk": True, "movable": ["stream"],
        "due": ["stream"], "can_postpone": True,
    } | changed  # fmt: skip
    deadlines = SimpleNamespace(can_postpone=lambda *_: state["can_postpone"])
    scheduler: Any = SimpleNamespace(**state, deadlines=deadlines, clock=lambda: 0.0)
    postponed = Scheduler.postpone_chunks(
        scheduler, state["due"], state["movable"], first_chunk=state["first_chunk"]
    )
    assert postponed is expected
    assert scheduler._postponed == (state["due"] if expected else ())


def test_chunks_wait_if_no_deadline_comes_before_three_iterations_and_the_delivery() -> None:
    deadlines = DeadlineScheduler(64, 128, 1024, delivery_s=0.005)
    deadlines.times.add(IterationWork(0, 2, 1, 0.002, 0.003))
    # Two iterations of three streams, one of one stream, and the delivery.
    limit_s = 2 * 1.5 * 0.003 + 0.003 + 0.005

    def can_postpone(num_movable: int, *slacks_s: float) -> bool:
        due: list[Any] = [SimpleNamespace(deadline_s=10 + slack_s) for slack_s in slacks_s]
        return deadlines.can_postpone(due, num_movable, 10.0)

    assert can_postpone(2, limit_s + 1e-6) and not can_postpone(2, limit_s - 1e-6)
    assert not can_postpone(2, 1.0, -1.0) and not can_postpone(2, float("-inf"))
    assert can_postpone(23, 1.0) and not can_postpone(24, 1.0)
