"""Who has a slot, who gives it up, who comes next."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from megakernel_tts import (
    AudioChunk,
    Finish,
    Session,
)
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.loader import Loaded
from megakernel_tts.text.splitter import Limits
from tests.fakes import ScriptedBackend
from tests.rig import TEXT, Rig, codes, drain, read, scripted


def test_more_streams_than_slots_all_finish(rig: Rig) -> None:
    sessions = [rig.open(seed=seed) for seed in range(7)]
    for seed, session in enumerate(sessions):
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.frames))
    assert max(rig.backend.batches) == 2
    assert rig.idle()
    assert len(rig.backend.threads) == 1


def test_long_texts_take_turns_with_short_ones(load: Callable[..., Loaded]) -> None:
    """With one slot a short text waits for a piece of the long one, not for its end."""
    rig = Rig(load(), ScriptedBackend(num_slots=1))
    long = rig.open(" ".join(f"Sentence number {i} is to be said." for i in range(60)), seed=1)
    short = rig.open("Hello there.", seed=2)
    order: list[str] = []
    readers = [
        threading.Thread(target=lambda s=s, name=name: (drain(s), order.append(name)))
        for name, s in (("long", long), ("short", short))
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert order == ["short", "long"]
    rig.engine.close()


def test_a_slot_is_not_held_between_sentences(load: Callable[..., Loaded]) -> None:
    rig = Rig(load(), ScriptedBackend(num_slots=1))
    live = rig.open(None, layout="full", limits=Limits(hard=1))
    live.push_text("hello to you. And then")
    next(iter(live))
    assert drain(rig.open(seed=5))[1].reason == "eos"
    live.end()
    assert drain(live)[1].reason == "eos"
    rig.engine.close()


def test_a_slot_that_comes_free_wakes_whoever_waits_for_it(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who waits stands before the one who leaves, and nothing else moves."""
    monkeypatch.setattr("megakernel_tts.engine.loop._PATIENCE", 60.0)
    rig = Rig(load(), ScriptedBackend(num_slots=1))
    waiting = rig.open(None, seed=2)
    live = rig.open(None, seed=1)
    live.push_text("hello to ")
    next(iter(live))
    waiting.push_text(TEXT)
    waiting.end()
    time.sleep(0.1)
    live.cancel()
    reader = threading.Thread(target=drain, args=(waiting,), daemon=True)
    reader.start()
    reader.join(10)
    assert not reader.is_alive()
    rig.engine.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakernel_tts.engine.loop._PATIENCE", 0.02)


@pytest.mark.usefixtures("impatient")
def test_readers_that_stop_hold_no_slot_against_others(rig: Rig) -> None:
    """Every slot is taken by somebody who does not read; the others speak, then those go on."""
    lazy = [rig.open(seed=i, largest=2, ahead=5) for i in range(2)]
    while sum(rig.backend.batches) < 10:
        time.sleep(0.005)
    assert {f.reason for f in read([rig.open(seed=10 + i) for i in range(3)])} == {"eos"}
    assert rig.backend.suspended >= 1
    time.sleep(0.05)
    assert "resume" not in rig.backend.events  # nobody has read yet
    for seed, session in enumerate(lazy):
        chunks, finish = drain(session)
        assert finish == Finish("eos", rig.frames)
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.frames))
    assert rig.idle()


@pytest.mark.usefixtures("impatient")
def test_writers_that_pause_hold_no_slot_against_others(rig: Rig) -> None:
    live = [rig.open(None, seed=i) for i in range(2)]
    heard: list[list[AudioChunk]] = [[], []]
    for portion in ("hello to", " the world, this", " is a test of speech."):
        for i, session in enumerate(live):
            session.push_text(portion)
            event = next(iter(session))
            assert isinstance(event, AudioChunk)
            heard[i].append(event)
        assert {f.reason for f in read([rig.open(seed=10 + i) for i in range(2)])} == {"eos"}
    assert rig.backend.suspended >= 3
    for seed, session in enumerate(live):
        session.end()
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(heard[seed] + chunks), scripted(seed, finish.frames))
    assert rig.idle()


@pytest.mark.usefixtures("impatient")
def test_nobody_is_suspended_while_nobody_waits(rig: Rig) -> None:
    live = [rig.open(None, seed=i) for i in range(3)]  # the third has nothing to say
    for session in live[:2]:
        session.push_text("hello to ")
        next(iter(session))
    time.sleep(0.1)
    assert rig.backend.suspended == 0


def test_short_pauses_cost_no_slot(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer of a word now and then keeps its slot, however long it goes on."""
    monkeypatch.setattr("megakernel_tts.engine.loop._PATIENCE", 0.4)
    rig = Rig(load(), ScriptedBackend(num_slots=1))
    live = rig.open(None, seed=1)
    live.push_text("hello to ")
    next(iter(live))
    waiting = rig.open(seed=2)
    for _ in range(8):
        live.push_text("the world ")
        time.sleep(0.1)
    assert rig.backend.suspended == 0
    live.cancel()
    assert drain(waiting)[1].reason == "eos"
    rig.engine.close()


@pytest.mark.usefixtures("impatient")
def test_suspended_streams_may_be_cancelled(rig: Rig) -> None:
    live = [rig.open(None, seed=i) for i in range(2)]
    for session in live:
        session.push_text("hello to ")
        next(iter(session))
    assert read([rig.open(seed=9)])[0].reason == "eos"
    assert rig.backend.suspended >= 1
    for session in live:
        session.cancel()
    assert rig.idle()


@pytest.mark.usefixtures("impatient")
def test_who_was_suspended_goes_on_before_anyone_begins(load: Callable[..., Loaded]) -> None:
    rig = Rig(load(), ScriptedBackend(num_slots=1))
    late, live = rig.open(None, seed=1), rig.open(None, seed=2)
    live.push_text("hello to ")
    next(iter(live))
    other = rig.open(seed=3)
    next(iter(other))
    rig.backend.gate.clear()
    for session in (late, live):
        session.push_text(TEXT)
        session.end()
    rig.backend.gate.set()
    assert {f.reason for f in read([late, live, other])} == {"eos"}
    assert [e for e in rig.backend.events if e != "frame"] == ["prefill"] * 2 + [
        "resume",
        "prefill",
    ]
    rig.engine.close()


def _burst(rig: Rig, seeds: range) -> list[Session]:
    """Sessions that begin while somebody speaks; all of them are there before the loop looks."""
    rig.backend.endless = True
    next(iter(rig.open(seed=0)))
    rig.backend.gate.clear()
    time.sleep(0.05)  # the loop waits within a frame
    rig.backend.events.clear()
    sessions = [rig.open(seed=seed) for seed in seeds]
    rig.backend.gate.set()
    for session in sessions:
        assert isinstance(next(iter(session)), AudioChunk)
    return sessions


def test_streams_that_come_together_begin_together(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a frame every one of them has its first chunk, also if some prompts go ahead."""
    monkeypatch.setattr("megakernel_tts.engine.loop._AHEAD", 2)  # of ten, nine are common
    rig = Rig(load(), ScriptedBackend(num_slots=6))
    _burst(rig, range(1, 6))
    assert rig.backend.together == [1, 2, 3]
    begun = rig.backend.events.index("prefill")
    assert begun <= 2 and rig.backend.events[begun : begun + 3] == ["prefill", "prefill", "frame"]
    assert rig.backend.starts[1:] == [(seed, 0) for seed in range(1, 6)]
    rig.engine.close()


def test_prompts_of_a_burst_do_not_hold_up_those_who_speak(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many positions of prompts there is a frame for those who speak."""
    for most in ("_AHEAD", "_PROMPTS"):
        monkeypatch.setattr(f"megakernel_tts.engine.loop.{most}", 2)  # of ten, nine are common
    rig = Rig(load(), ScriptedBackend(num_slots=6))
    _burst(rig, range(1, 6))
    assert rig.backend.together == [1, 2, 2, 1]
    prefills = [i for i, event in enumerate(rig.backend.events) if event == "prefill"]
    assert np.diff(prefills).tolist() == [2, 2]  # a single frame between them
    rig.engine.close()


def test_a_prompt_that_fails_ends_its_stream_alone(load: Callable[..., Loaded]) -> None:
    rig = Rig(load(), ScriptedBackend(num_slots=6))
    rig.backend.unable = {13}
    rig.backend.endless = True
    next(iter(rig.open(seed=0)))
    rig.backend.gate.clear()
    time.sleep(0.05)
    sessions = [rig.open(seed=seed) for seed in (1, 13, 2)]
    rig.backend.gate.set()
    finish = drain(sessions[1])[1]
    assert finish.reason == "error" and "unable seed 13" in str(finish.error)
    assert rig.backend.together == [1, 1, 1]
    rig.backend.endless = False
    for seed, session in ((1, sessions[0]), (2, sessions[2])):
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(chunks), scripted(seed, finish.frames))
    rig.engine.close()


def test_who_cancels_is_seen_to_before_the_next_prompt(load: Callable[..., Loaded]) -> None:
    backend = ScriptedBackend(num_slots=2)
    rig = Rig(load(), backend)
    backend.endless = True
    first, second = rig.open(seed=0), rig.open(seed=1)
    next(iter(first))
    next(iter(second))
    backend.gate.clear()
    waiting = rig.open(seed=2)
    first.cancel()
    backend.gate.set()
    next(iter(waiting))  # it had no slot but the cancelled one's
    assert backend.starts == [(0, 0), (1, 0), (2, 0)]
    rig.engine.close()


def test_a_sentence_that_is_not_ended_takes_nobodys_slot(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megakernel_tts.engine.loop._PATIENCE", 0.02)
    rig = Rig(load(), ScriptedBackend(num_slots=1))
    live = rig.open(None, seed=1)
    live.push_text("hello to ")
    next(iter(live))
    whole = rig.open(None, seed=2, layout="full", limits=Limits(hard=1))
    whole.push_text("Not yet all of the sentence")
    time.sleep(0.1)
    assert rig.backend.suspended == 0
    rig.engine.close()


def test_who_comes_while_a_prompt_runs_begins_with_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's first chunk waits for a frame of others, and each says what it says alone."""
    prefill, second = rig.backend.prefill, list[Session]()

    def meanwhile(starts: Sequence[PrefillRequest]) -> None:
        prefill(starts)
        if not second:
            second.append(rig.open(seed=2))

    monkeypatch.setattr(rig.backend, "prefill", meanwhile)
    spoken = [drain(rig.open(seed=1))]
    spoken += map(drain, second)
    for seed, (chunks, finish) in enumerate(spoken, 1):
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.frames))
    assert rig.backend.events[:3] == ["prefill", "prefill", "frame"]
    assert rig.backend.batches[0] == 2


def test_who_leaves_while_others_begin_gets_no_prompt(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, left = rig.backend.prefill, list[Session]()

    def meanwhile(starts: Sequence[PrefillRequest]) -> None:
        prefill(starts)
        if not left:
            left.append(rig.open(seed=2))
            left[0].cancel()

    monkeypatch.setattr(rig.backend, "prefill", meanwhile)
    assert drain(rig.open(seed=1))[1].reason == "eos"
    assert drain(left[0])[1].reason == "cancelled"
    assert rig.backend.starts == [(1, 0)]


def test_who_is_on_the_way_is_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakernel_tts.engine.loop._COURTESY", 20.0)
    with rig.engine.pending_open():
        first = rig.open(seed=1)
        time.sleep(0.05)
        assert rig.backend.events == ["prefill"]
        second = rig.open(seed=2)
    begin = time.monotonic()
    assert {finish.reason for finish in read([first, second])} == {"eos"}
    assert rig.backend.batches[0] == 2
    assert time.monotonic() - begin < 10, "nobody told that all are there"


def test_nobody_waits_long_for_one_who_does_not_come(rig: Rig) -> None:
    begin = time.monotonic()
    with rig.engine.pending_open():
        assert drain(rig.open())[1].reason == "eos"
    assert time.monotonic() - begin < 3, "it waited for longer than a courtesy lasts"


def test_what_was_decoded_leaves_before_others_are_waited_for(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(load(), ScriptedBackend(num_slots=3))
    rig.backend.gate.clear()
    speaks = rig.open(seed=1, first=1, largest=1)
    while not rig.backend.asked:  # its first frame is being made
        time.sleep(0.001)
    monkeypatch.setattr("megakernel_tts.engine.loop._COURTESY", 20.0)
    with rig.engine.pending_open():
        other = rig.open(seed=2)
        begin = time.monotonic()
        rig.backend.gate.set()
        assert isinstance(next(iter(speaks)), AudioChunk)
        assert time.monotonic() - begin < 10, "it waited, too"
        while rig.backend.events.count("prefill") < 2:
            time.sleep(0.001)
        assert len(rig.backend.batches) == 1
    assert {finish.reason for finish in read([speaks, other])} == {"eos"}
    rig.engine.close()
