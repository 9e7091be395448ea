"""Slots that share too little memory for all of their positions: streams wait, and none fails."""

import random
import threading
from typing import Any

import numpy as np
import pytest

from megakernel_tts import Finish, Session
from megakernel_tts.engine.scheduler import SchedulingPolicy
from megakernel_tts.text.prompt import Prompt
from tests.fakes import PAGE_SIZE, TIMEOUT_S
from tests.rig import TEXT, MakeRig, codes, drain, read, scripted

MAX_POSITIONS = 8 * PAGE_SIZE  # a stream may have eight pages


def _text(num_words: int) -> str:
    return " ".join((TEXT.split() * 9)[:num_words])


def _read_all(sessions: list[Session]) -> list[tuple[np.ndarray, Finish]]:
    """Codes and finish of sessions that are read together."""
    results: dict[int, tuple[np.ndarray, Finish]] = {}

    def keep(i: int, session: Session) -> None:
        chunks, finish = drain(session)
        results[i] = codes(chunks), finish

    readers = [threading.Thread(target=keep, args=one, daemon=True) for one in enumerate(sessions)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(TIMEOUT_S)
        assert not reader.is_alive(), "a session does not end"
    return [results[i] for i in range(len(sessions))]


@pytest.mark.parametrize(("num_pages", "seed"), [(8, 0), (13, 1)])
def test_streams_of_random_lengths_all_finish_with_their_codes(
    make_rig: MakeRig, num_pages: int, seed: int
) -> None:
    """Six slots of up to eight pages share as few as one of them may need."""
    rng = random.Random(seed)
    rig = make_rig(6, num_pages, MAX_POSITIONS)
    sessions = [
        rig.open(
            _text(rng.randint(5, 45)),
            seed=i,
            priority=rng.randrange(2),
            largest=rng.choice((1, 4)),
            ahead=rng.choice((4, 400)),
        )
        for i in range(8)
    ]
    for i, (made, finish) in enumerate(_read_all(sessions)):
        assert finish.reason == "eos"
        np.testing.assert_array_equal(made, scripted(i, finish.frames))
    assert rig.idle()
    assert rig.backend.pool.num_free == num_pages


def test_streams_that_fill_the_memory_do_not_wait_for_each_other(make_rig: MakeRig) -> None:
    """Four equal streams begin together, and each needs seven of the eight pages."""
    rig = make_rig(4, 8, MAX_POSITIONS)
    rig.backend.gate.clear()
    sessions = [rig.open(_text(40), seed=i, largest=1) for i in range(4)]
    rig.resume()
    for i, (made, finish) in enumerate(_read_all(sessions)):
        assert finish.reason == "eos"
        np.testing.assert_array_equal(made, scripted(i, finish.frames))
    assert rig.backend.num_swapped_out > 0
    assert rig.idle()


def test_a_stream_waits_until_memory_is_left_for_the_others_to_grow(make_rig: MakeRig) -> None:
    rig = make_rig(4, 8, MAX_POSITIONS)
    rig.backend.endless = True
    speaking = [rig.open(_text(5), seed=i, largest=2, ahead=5) for i in range(2)]
    rig.settle()
    pool = rig.backend.pool
    while pool.num_free > 2:  # as if the streams were longer
        assert pool.reserve(0, pool.num_positions(0) + 1)
    waiting = rig.open(_text(5), seed=2)
    rig.settle()
    assert [stream.slot for stream in rig.streams] == [0, 1, None]
    rig.advance(0.25)
    rig.settle()
    assert waiting.slot_wait_s == 0.25
    assert rig.backend.num_swapped_out == 0
    rig.backend.endless = False
    speaking[0].cancel()
    assert {finish.reason for finish in read([waiting, speaking[1]])} == {"eos"}


def test_the_prompt_of_a_stream_that_waits_for_memory_is_built_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(4, 8, MAX_POSITIONS)
    rig.backend.endless = True
    speaking = rig.open(_text(5), seed=0, largest=2, ahead=5)
    rig.settle()
    pool = rig.backend.pool
    while pool.num_free > 1:
        assert pool.reserve(0, pool.num_positions(0) + 1)
    builder, num_built = rig.engine.prompt_builder, 0
    build = builder.build

    def counted(*arguments: Any, **keywords: Any) -> Prompt | None:
        nonlocal num_built
        num_built += 1
        return build(*arguments, **keywords)

    monkeypatch.setattr(builder, "build", counted)
    waiting = rig.open(None, seed=1)
    portions = ("One two", " three four", " five six")
    for portion in portions:
        waiting.push_text(portion)
        rig.settle()
        assert (rig.streams[1].slot, num_built) == (None, 1)
    waiting.end()
    rig.backend.endless = False
    speaking.cancel()
    [(made, finish)] = _read_all([waiting])
    assert num_built == 1
    num_tokens = len(rig.loaded.tokenizer.encode("".join(portions)))
    assert finish.reason == "eos" and finish.frames == num_tokens + rig.backend.tail
    np.testing.assert_array_equal(made, scripted(1, finish.frames))


def test_a_stream_without_a_slot_waits_for_the_memory_of_a_stalled_one(make_rig: MakeRig) -> None:
    rig = make_rig(4, 8, MAX_POSITIONS)
    stalled = rig.open(_text(30), seed=0, largest=2, ahead=5)  # its reader does not read
    rig.settle()
    assert rig.backend.pool.reserve(0, 7 * PAGE_SIZE)
    other = rig.open(_text(40), seed=1)
    rig.settle()
    assert rig.streams[1].slot is None, "the free page is for the stalled stream"
    rig.advance(SchedulingPolicy().stall_timeout_s)
    assert read([other])[0].reason == "eos"
    assert rig.backend.num_swapped_out == 1
    [(made, finish)] = _read_all([stalled])
    assert finish.reason == "eos"
    np.testing.assert_array_equal(made, scripted(0, finish.frames))


def test_a_stream_that_speaks_takes_the_memory_of_a_stalled_one_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(4, 8, MAX_POSITIONS)
    stalled = rig.open(_text(30), seed=0, largest=2, ahead=5)
    rig.settle()
    assert rig.backend.pool.reserve(0, 6 * PAGE_SIZE)
    assert read([rig.open(_text(40), seed=1)])[0].reason == "eos"  # the clock stands still
    assert rig.backend.num_swapped_out == 1
    assert read([stalled])[0].reason == "eos"


def test_a_stream_of_lower_priority_makes_room_in_memory(make_rig: MakeRig) -> None:
    rig = make_rig(4, 8, MAX_POSITIONS)
    lower = rig.open(_text(30), seed=0, priority=1, largest=2, ahead=5)
    rig.settle()
    assert rig.backend.pool.reserve(0, 8 * PAGE_SIZE)
    urgent = rig.open(_text(5), seed=1, priority=0)
    assert read([urgent])[0].reason == "eos"
    assert rig.backend.num_swapped_out == 1
    assert read([lower])[0].reason == "eos"


def test_nothing_is_swapped_out_if_memory_suffices_for_all_slots(make_rig: MakeRig) -> None:
    rig = make_rig(3, None, MAX_POSITIONS)
    sessions = [rig.open(_text(45), seed=i) for i in range(6)]
    assert {finish.reason for finish in read(sessions)} == {"eos"}
    assert rig.backend.num_swapped_out == 0
