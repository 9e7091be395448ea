"""Slots: the order in which streams get them, swapping of stalled streams."""

import threading
from collections.abc import Callable

import numpy as np

from megakernel_tts import AudioChunk, Session
from megakernel_tts.engine.scheduler import SchedulingPolicy
from megakernel_tts.text.splitter import SplitLimits
from tests.fakes import TIMEOUT_S
from tests.rig import TEXT, UNLIMITED, MakeRig, Rig, codes, drain, read, scripted

STALL_TIMEOUT_S = SchedulingPolicy().stall_timeout_s


def start_live(rig: Rig, seed: int) -> Session:
    """A stream that has spoken the text it has, and waits for more."""
    session = rig.open(None, seed=seed)
    session.push_text("hello to ")
    assert isinstance(next(iter(session)), AudioChunk)
    rig.settle()
    return session


def stall(rig: Rig) -> None:
    """Lets the stall timeout pass."""
    rig.settle()
    rig.advance(STALL_TIMEOUT_S)


def test_more_streams_than_slots_all_finish(rig: Rig) -> None:
    sessions = [rig.open(seed=seed) for seed in range(7)]
    for seed, session in enumerate(sessions):
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.num_frames))
    assert max(rig.backend.batch_sizes) == 2
    assert rig.idle()
    assert len(rig.backend.threads) == 1


def test_segments_of_long_and_short_texts_alternate(make_rig: MakeRig) -> None:
    """With one slot a short text waits for a segment of the long one, not for its end."""
    rig = make_rig(1)
    long = rig.open(" ".join(f"Sentence number {i} is to be said." for i in range(18)), seed=1)
    short = rig.open("Hello there.", seed=2)
    order: list[str] = []
    readers = [
        threading.Thread(target=lambda s=s, name=name: (drain(s), order.append(name)))
        for name, s in (("long", long), ("short", short))
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(TIMEOUT_S)
    assert order == ["short", "long"]


def test_a_stream_between_sentences_has_no_slot(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    live = rig.open(None, layout="full", limits=SplitLimits(sentence=1))
    live.push_text("hello to you. And then")
    next(iter(live))
    assert drain(rig.open(seed=5))[1].reason == "eos"
    live.end()
    assert drain(live)[1].reason == "eos"


def test_a_freed_slot_goes_to_a_waiting_stream(make_rig: MakeRig) -> None:
    """The waiting stream is queued before the one that leaves, and nothing else moves."""
    rig = make_rig(1)
    waiting = rig.open(None, seed=2)
    live = start_live(rig, seed=1)
    waiting.push_text(TEXT)
    waiting.end()
    rig.settle()
    assert rig.backend.prompts == [(1, 0)]
    live.cancel()
    assert read([waiting])[0].reason == "eos"


def test_a_stream_counts_the_time_for_which_all_slots_were_in_use(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    waiting, live = rig.open(None, seed=2), start_live(rig, seed=1)
    rig.advance(0.5)  # without text a stream does not wait for a slot
    waiting.push_text(TEXT)
    waiting.end()
    rig.settle()
    assert waiting.slot_wait_s == 0
    rig.advance(0.25)
    assert waiting.slot_wait_s == 0.25, "the wait under way is missing"
    live.cancel()
    assert read([waiting])[0].reason == "eos"
    assert (live.slot_wait_s, waiting.slot_wait_s) == (0, 0.25)
    after = rig.open(seed=3)
    assert read([after])[0].reason == "eos" and after.slot_wait_s == 0


def test_the_waiting_time_of_a_cancelled_stream_does_not_grow(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    live, waiting = start_live(rig, seed=1), rig.open(TEXT, seed=2)
    rig.settle()
    rig.advance(0.25)
    waiting.cancel()
    rig.settle()
    rig.advance(0.5)
    assert (live.slot_wait_s, waiting.slot_wait_s) == (0, 0.25)


def test_streams_with_a_stalled_reader_are_swapped_out_and_lose_no_frame(rig: Rig) -> None:
    lagging = [rig.open(seed=i, largest=2, ahead=5) for i in range(2)]
    rig.settle()
    assert [stream.slot for stream in rig.streams] == [0, 1]
    others = [rig.open(seed=10 + i) for i in range(3)]
    stall(rig)
    assert {finish.reason for finish in read(others)} == {"eos"}
    rig.settle()
    assert rig.backend.num_swapped_out >= 1
    assert "swap_in" not in rig.backend.events, "their readers have not read yet"
    for seed, session in enumerate(lagging):
        chunks, finish = drain(session)
        assert (finish.reason, finish.frames) == ("eos", rig.num_frames)
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.num_frames))
    assert rig.idle()


def test_streams_with_a_stalled_text_are_swapped_out_and_lose_no_frame(rig: Rig) -> None:
    live = [rig.open(None, seed=i) for i in range(2)]
    spoken: list[list[AudioChunk]] = [[], []]
    for portion in ("hello to", " the world, this", " is a test of speech."):
        for i, session in enumerate(live):
            session.push_text(portion)
            event = next(iter(session))
            assert isinstance(event, AudioChunk)
            spoken[i].append(event)
        others = [rig.open(seed=10 + i) for i in range(2)]
        stall(rig)
        assert {finish.reason for finish in read(others)} == {"eos"}
    assert rig.backend.num_swapped_out >= 3
    for seed, session in enumerate(live):
        session.end()
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(spoken[seed] + chunks), scripted(seed, finish.frames))
    assert rig.idle()


def test_a_stalled_stream_keeps_its_slot_while_none_waits(rig: Rig) -> None:
    for seed in range(2):
        start_live(rig, seed)
    rig.open(None, seed=2)  # it has no text, so that it needs no slot
    stall(rig)
    rig.settle()
    assert rig.backend.num_swapped_out == 0


def test_pauses_below_the_stall_timeout_cost_no_slot(make_rig: MakeRig) -> None:
    """A stream that gets a word now and then keeps its slot for any length of speech."""
    rig = make_rig(1)
    live = start_live(rig, seed=1)
    waiting = rig.open(seed=2)
    for _ in range(8):
        live.push_text("the world ")
        rig.settle()
        rig.advance(0.9 * STALL_TIMEOUT_S)
        rig.settle()
    assert rig.backend.num_swapped_out == 0
    live.cancel()
    assert drain(waiting)[1].reason == "eos"


def test_a_stream_that_is_swapped_out_can_be_cancelled(rig: Rig) -> None:
    live = [start_live(rig, seed) for seed in range(2)]
    other = rig.open(seed=9)
    stall(rig)
    assert read([other])[0].reason == "eos"
    assert rig.backend.num_swapped_out >= 1
    for session in live:
        session.cancel()
    assert rig.idle()


def test_a_swapped_out_stream_gets_a_slot_before_new_streams(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    late, live = rig.open(None, seed=1), start_live(rig, seed=2)
    other = rig.open(seed=3)
    stall(rig)
    next(iter(other))
    rig.backend.gate.clear()
    for session in (late, live):
        session.push_text(TEXT)
        session.end()
    rig.resume()
    assert {finish.reason for finish in read([late, live, other])} == {"eos"}
    changes = [event for event in rig.backend.events if event != "frame"]
    assert changes == ["prefill", "prefill", "swap_in", "prefill"]


def test_waiting_streams_get_slots_by_priority_and_then_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    first = start_live(rig, seed=9)
    priorities = (2, 1, 1, 2, 0)
    sessions = [rig.open(seed=i, priority=priority) for i, priority in enumerate(priorities)]
    rig.settle()
    first.cancel()
    assert {finish.reason for finish in read(sessions)} == {"eos"}
    assert [seed for seed, _ in rig.backend.prompts] == [9, 4, 1, 2, 0, 3]
    assert rig.backend.num_swapped_out == 0


def test_the_last_stream_of_the_lowest_priority_gives_up_its_slot(make_rig: MakeRig) -> None:
    rig = make_rig(3)
    lower = [rig.open(seed=i, priority=p, largest=2, ahead=5) for i, p in enumerate((2, 2, 1))]
    rig.settle()  # their readers have not read
    urgent = rig.open(seed=3, priority=0, largest=2, ahead=5)
    rig.settle()
    assert [stream.slot is None for stream in rig.streams] == [False, True, False, False]
    for seed, session in zip((3, 0, 1, 2), (urgent, *lower), strict=True):
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.num_frames))
    assert rig.idle()


def test_a_stream_of_higher_priority_begins_after_the_frame_under_way(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    rig.backend.gate.clear()
    lower = rig.open(seed=1, priority=1)
    rig.hold()
    urgent = rig.open(seed=2)
    rig.resume()
    assert {finish.reason for finish in read([urgent])} == {"eos"}
    assert rig.backend.events[:3] == ["prefill", "frame", "prefill"]
    chunks, _ = drain(lower)
    np.testing.assert_array_equal(codes(chunks), scripted(1, rig.num_frames))


def after_the_check(rig: Rig, action: Callable[[], object]) -> None:
    """Does something when the loop has decided not to deliver the batch in flight."""
    loop = rig.engine._loop
    check, pending = loop._deliver_if_required, [action]

    def check_and_act() -> None:
        check()
        if loop.decoding.in_flight and pending:
            pending.pop()()

    loop._deliver_if_required = check_and_act  # type: ignore[method-assign]


def test_a_stream_cancelled_while_its_chunk_is_decoded_ends(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    rig.backend.gate.clear()
    session = rig.open(largest=1)
    after_the_check(rig, session.cancel)
    rig.resume()
    assert [finish.reason for finish in read([session])] == ["cancelled"]
    assert rig.idle()


def test_a_slot_that_is_needed_while_its_chunk_is_decoded_costs_no_frame(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(1)
    rig.backend.gate.clear()
    session, urgent = rig.open(seed=1, priority=1, largest=1), list[Session]()
    after_the_check(rig, lambda: urgent.append(rig.open(seed=2)))
    rig.resume()
    chunks, finish = drain(session)
    assert finish.reason == "eos"
    np.testing.assert_array_equal(codes(chunks), scripted(1, rig.num_frames))
    assert [finish.reason for finish in read(urgent)] == ["eos"]
    assert rig.backend.num_swapped_out == 1


def test_streams_of_one_priority_keep_their_slots(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    rig.backend.gate.clear()
    sessions = [rig.open(seed=seed, priority=1) for seed in range(3)]
    rig.hold()
    sessions.append(rig.open(seed=3, priority=2))
    rig.resume()
    assert {finish.reason for finish in read(sessions)} == {"eos"}
    assert rig.backend.num_swapped_out == 0


def test_the_slot_of_a_cancelled_stream_is_free_for_the_next_prompt(make_rig: MakeRig) -> None:
    rig = make_rig(2)
    rig.backend.endless = True
    first, second = (rig.open(seed=i, ahead=UNLIMITED) for i in range(2))
    next(iter(first))
    next(iter(second))
    rig.hold()
    waiting = rig.open(seed=2)
    first.cancel()
    rig.resume()
    next(iter(waiting))
    assert rig.backend.prompts == [(0, 0), (1, 0), (2, 0)]


def test_an_unfinished_sentence_in_the_full_layout_takes_no_slot(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    start_live(rig, seed=1)
    full = rig.open(None, seed=2, layout="full", limits=SplitLimits(sentence=1))
    full.push_text("Not yet all of the sentence")
    stall(rig)
    rig.settle()
    assert rig.backend.num_swapped_out == 0
