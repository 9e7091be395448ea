"""Which events shorten a step: not sessions that were read from the queue before it."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from megakernel_tts import AudioChunk, Session
from megakernel_tts.backends.protocol import PrefillRequest, PrefillResult
from megakernel_tts.engine.interrupts import Interrupts
from megakernel_tts.engine.stream import Stream
from tests.fakes import ScriptedBackend
from tests.rig import MakeRig, Rig, codes, drain, scripted


def make_interrupts(backend: ScriptedBackend) -> Interrupts:
    return Interrupts(backend, lambda: None)


_EVENTS = (Interrupts.interrupt, Interrupts.note_opened, Interrupts.interrupt_unless_shared)


def test_an_opened_session_that_was_read_interrupts_no_step() -> None:
    backend = ScriptedBackend(num_slots=1)
    interrupts = make_interrupts(backend)
    interrupts.note_opened()
    interrupts.drop_opened()
    assert backend.interrupted, "it was not read"
    interrupts.note_reading()
    interrupts.drop_opened()
    assert not backend.interrupted


@pytest.mark.parametrize("event", [Interrupts.interrupt, Interrupts.interrupt_unless_shared])
def test_other_interruptions_stay_until_an_iteration_begins(
    event: Callable[[Interrupts], None],
) -> None:
    backend = ScriptedBackend(num_slots=1)
    interrupts = make_interrupts(backend)
    event(interrupts)
    interrupts.note_opened()
    interrupts.note_reading()
    interrupts.drop_opened()
    assert backend.interrupted
    interrupts.clear()
    assert not backend.interrupted
    interrupts.note_opened()
    interrupts.note_reading()
    interrupts.drop_opened()
    assert not backend.interrupted, "the earlier interruption has no effect any more"


@pytest.mark.parametrize("event", [Interrupts.note_opened, Interrupts.interrupt_unless_shared])
def test_sessions_do_not_end_a_shared_step(event: Callable[[Interrupts], None]) -> None:
    backend, woken = ScriptedBackend(num_slots=1), list[bool]()
    interrupts = Interrupts(backend, lambda: woken.append(True))
    event(interrupts)
    assert backend.interrupted and len(woken) == 1
    interrupts.step_is_shared = True
    interrupts.drop_opened()
    assert not backend.interrupted, "the event came before the step"
    event(interrupts)
    assert not backend.interrupted, "it came during the step"
    assert len(woken) == 2
    interrupts.interrupt()
    interrupts.drop_opened()
    assert backend.interrupted
    interrupts.clear()
    event(interrupts)
    assert backend.interrupted, "the next step may be long"


@pytest.mark.parametrize("event", _EVENTS)
def test_events_do_nothing_in_a_forked_process(event: Callable[[Interrupts], None]) -> None:
    backend, woken = ScriptedBackend(num_slots=1), list[bool]()
    interrupts = Interrupts(backend, lambda: woken.append(True))
    interrupts._process = SimpleNamespace(is_current=False)  # type: ignore[assignment]
    event(interrupts)
    assert not backend.interrupted and not woken
    interrupts.drop_opened()
    assert not backend.interrupted


@pytest.mark.parametrize("event", _EVENTS)
def test_an_event_while_sessions_are_dropped_interrupts(
    event: Callable[[Interrupts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has interrupted the backend before the backend's flag is cleared."""
    backend = ScriptedBackend(num_slots=1)
    interrupts, clear = make_interrupts(backend), backend.clear_interrupt

    def clear_after_event() -> None:
        event(interrupts)
        clear()

    monkeypatch.setattr(backend, "clear_interrupt", clear_after_event)
    interrupts.drop_opened()
    assert backend.interrupted


@pytest.mark.parametrize("event", _EVENTS)
def test_an_event_is_recorded_before_the_backend_is_interrupted(
    event: Callable[[Interrupts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ScriptedBackend(num_slots=1)
    interrupts, interrupt = make_interrupts(backend), backend.interrupt

    def interrupt_before_loop_goes_on() -> None:
        interrupt()
        interrupts.drop_opened()

    monkeypatch.setattr(backend, "interrupt", interrupt_before_loop_goes_on)
    event(interrupts)
    assert backend.interrupted


def during_first_prefill(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]
) -> None:
    """Runs an action while the first prompts run."""
    prefill = rig.backend.prefill

    def observed(requests: Sequence[PrefillRequest], budget: int | None = None) -> PrefillResult:
        monkeypatch.setattr(rig.backend, "prefill", prefill)
        action()
        return prefill(requests, budget)

    monkeypatch.setattr(rig.backend, "prefill", observed)


def test_streams_that_are_opened_while_prompts_run_begin_with_a_whole_step(
    loud_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(seed: int) -> Session:
        return loud_rig.open(seed=seed, at_once=True, layout="full", first=3, largest=3)

    opened: list[Session] = []
    during_first_prefill(loud_rig, monkeypatch, lambda: opened.append(begin(1)))
    np.testing.assert_array_equal(codes(drain(begin(0))[0]), scripted(0, 3))
    np.testing.assert_array_equal(codes(drain(opened[0])[0]), scripted(1, 3))
    assert loud_rig.backend.batch_sizes[:3] == [2, 2, 2]
    assert loud_rig.backend.step_lengths[0] == 3
    assert loud_rig.backend.events[:5] == ["prefill", "prefill", "frame", "frame", "frame"]
    assert len(loud_rig.backend.step_lengths) <= 2, "the first step made all of its frames"


def test_a_session_that_begins_with_a_break_waits_for_one_frame(
    loud_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no slot yet, so the loop does not read it from the queue."""
    opened: list[Session] = []
    text = '<break time="0.5s"/>hello to the world.'
    during_first_prefill(
        loud_rig, monkeypatch, lambda: opened.append(loud_rig.open(text, seed=1, at_once=True))
    )
    speaking = loud_rig.open(seed=0, at_once=True, first=100, largest=100)
    assert isinstance(next(iter(speaking)), AudioChunk)
    silence = next(iter(opened[0]))
    assert isinstance(silence, AudioChunk) and not len(silence.codes)
    first_step = loud_rig.backend.events.index("frame")
    assert loud_rig.backend.step_lengths[0] > 1
    assert loud_rig.backend.events[first_step + 1] != "frame", "the first step made one frame"
    for session in (speaking, *opened):
        session.cancel()


def test_a_cancellation_while_prompts_run_ends_the_next_step(
    loud_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud_rig.backend.endless = True
    speaking: list[Session] = []
    during_first_prefill(loud_rig, monkeypatch, lambda: speaking[0].cancel())
    speaking.append(loud_rig.open(None, seed=0, first=100, largest=100))
    loud_rig.settle()
    speaking[0].push_text("hello to the world ")
    assert loud_rig.idle()
    assert len(loud_rig.backend.batch_sizes) <= 1


def test_a_stream_that_needs_another_ones_slot_waits_for_one_frame(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened after the loop has chosen whom to swap out, and before it reads the queue."""
    rig = make_rig(num_slots=1)
    rig.backend.endless = True
    rig.backend.gate.clear()
    speaking = rig.open(seed=0, first=100, largest=100, max_frames=350)
    rig.hold()
    loop, opened, made = rig.engine._loop, list[Session](), list[int]()
    feed, swap_out = loop._feed_or_finish, loop.scheduler.swap_out

    def open_once() -> None:
        if not opened:
            opened.append(rig.open(seed=1, at_once=True, priority=-1, max_frames=3))
            made.append(len(rig.backend.batch_sizes))
        feed()

    def record_swap(stream: Stream) -> None:
        made.append(len(rig.backend.batch_sizes))
        swap_out(stream)

    monkeypatch.setattr(loop, "_feed_or_finish", open_once)
    monkeypatch.setattr(loop.scheduler, "swap_out", record_swap)
    loop.interrupts.interrupt()
    rig.resume()
    rig.backend.wait_until(lambda: rig.backend.num_swapped_out == 1)
    assert made[1] - made[0] == 1
    assert codes(drain(opened[0])[0]).shape[0] == 3
    speaking.cancel()
