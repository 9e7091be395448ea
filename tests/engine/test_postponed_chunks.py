"""Chunks that are due are decoded behind the first chunk of another stream, if they can wait."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megakernel_tts import Session
from megakernel_tts.codec.decoder import DecodeRequest
from megakernel_tts.codec.vocoder import PendingSamples
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
