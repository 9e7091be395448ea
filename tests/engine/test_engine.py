"""The engine as sessions see it: finishing, cancelling, closing, reading from threads and tasks."""

import asyncio
import atexit
import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megakernel_tts import (
    AudioChunk,
    ChunkPolicy,
    EngineBusyError,
    EngineClosedError,
    Finish,
    Sampling,
    Session,
    TextError,
    Voice,
)
from megakernel_tts.loader import LoadedModel
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.text_queue import TextQueue
from tests.fakes import TIMEOUT_S, ScriptedBackend
from tests.rig import TEXT, UNLIMITED, Rig, codes, drain, scripted


def test_cancelling_delivers_a_prefix_and_frees_the_slot(loud_rig: Rig) -> None:
    loud_rig.backend.endless = True
    for wanted in (1, 2, 5):
        session = loud_rig.open(seed=3)
        got: list[AudioChunk] = []
        for event in session:
            if isinstance(event, Finish):
                assert event.reason == "cancelled"
                break
            got.append(event)
            if len(got) == wanted:
                session.cancel()
        assert len(got) == wanted
        np.testing.assert_array_equal(codes(got), scripted(3, sum(len(c.codes) for c in got)))
        assert loud_rig.idle()


def test_cancelling_takes_effect_within_a_frame(loud_rig: Rig) -> None:
    loud_rig.backend.endless = True
    session = loud_rig.open(ahead=UNLIMITED)
    next(iter(session))
    loud_rig.hold()
    before = len(loud_rig.backend.batch_sizes)
    session.cancel()
    loud_rig.resume()
    assert loud_rig.idle()
    assert len(loud_rig.backend.batch_sizes) - before <= 1


def test_a_session_that_waits_for_a_slot_can_be_cancelled(loud_rig: Rig) -> None:
    loud_rig.backend.endless = True
    speaking = [loud_rig.open(seed=i) for i in range(2)]
    waiting = loud_rig.open(seed=9)
    waiting.cancel()
    assert drain(waiting) == ([], Finish("cancelled", 0))
    for session in speaking:
        session.cancel()
    assert loud_rig.idle()


def test_leaving_or_dropping_a_session_cancels_it(loud_rig: Rig) -> None:
    loud_rig.backend.endless = True
    with loud_rig.open() as session:
        next(iter(session))
    assert loud_rig.idle()
    session = loud_rig.open()
    next(iter(session))
    del session
    gc.collect()
    assert loud_rig.idle()


def test_too_many_sessions_are_refused(load: Callable[..., LoadedModel]) -> None:
    loud_rig = Rig(load(), ScriptedBackend(num_slots=1), max_waiting=2)
    loud_rig.backend.endless = True
    sessions = [loud_rig.open(seed=i) for i in range(3)]
    with pytest.raises(EngineBusyError, match="3 sessions are open"):
        loud_rig.open()
    sessions[0].cancel()
    loud_rig.open().cancel()  # a cancelled session does not count
    loud_rig.engine.close()


def test_a_defect_of_the_loop_ends_every_session_with_an_error(
    loud_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(due: object) -> None:
        raise SystemError("bug")

    loud_rig.backend.gate.clear()
    session = loud_rig.open()
    loud_rig.hold()
    monkeypatch.setattr(loud_rig.engine._loop.decoding, "decode", fail)
    loud_rig.resume()
    _, finish = drain(session)
    assert finish.reason == "error" and "bug" in str(finish.error)
    with pytest.raises(EngineClosedError):
        loud_rig.open()


def test_closing_ends_every_session(load: Callable[..., LoadedModel]) -> None:
    loud_rig = Rig(load(), ScriptedBackend())
    loud_rig.backend.endless = True
    sessions = [loud_rig.open(seed=i) for i in range(5)]
    loud_rig.engine.close()
    loud_rig.engine.close()
    assert all(list(session)[-1] == session.finish for session in sessions)
    assert {s.finish.reason for s in sessions if s.finish} == {"cancelled"}
    with pytest.raises(EngineClosedError):
        loud_rig.open()


def test_closing_waits_for_the_thread(load: Callable[..., LoadedModel]) -> None:
    loud_rig = Rig(load(), ScriptedBackend())
    loud_rig.backend.endless = True
    session = loud_rig.open()
    next(iter(session))
    loud_rig.engine.close()
    assert not loud_rig.engine._thread.is_alive()


def test_an_engine_without_references_ends(load: Callable[..., LoadedModel]) -> None:
    """Its thread ends and its memory is freed; a reference to a session keeps it alive."""
    loud_rig = Rig(load(), ScriptedBackend())
    loud_rig.backend.endless = True
    session = loud_rig.open()
    thread, loop = loud_rig.engine._thread, weakref.ref(loud_rig.engine._loop)
    del loud_rig
    gc.collect()
    for _ in range(3):
        assert isinstance(next(iter(session)), AudioChunk)
    del session
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    gc.collect()
    assert loop() is None


def test_an_ended_engine_leaves_nothing_to_do_at_exit(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[weakref.ref[Callable[[], None]]] = []

    def register(callback: Callable[[], None]) -> None:
        registered.append(weakref.ref(callback))
        atexit_register(callback)

    atexit_register = atexit.register
    monkeypatch.setattr(atexit, "register", register)
    loud_rig = Rig(load(), ScriptedBackend())
    (callback,) = registered
    loud_rig.close()
    assert callback() is not None
    del loud_rig
    gc.collect()
    assert callback() is None


FREEING = """
import sys, threading, time, torch
from megakernel_tts import TTS

freeing, SECONDS = threading.Event(), 0.5

class Resource:
    def __del__(self):
        assert threading.current_thread() is not threading.main_thread()
        freeing.set()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            torch.ones(1 << 16).sum()  # releases the GIL

tts = TTS.load(sys.argv[1], "cpu")
tts._loaded.engine.backend.resource = Resource()
stream = tts.stream("hello to the world. " * 20)
next(stream)
del tts, stream
freeing.wait()
raise SystemExit(3)
"""


def test_the_interpreter_exits_after_the_engine_thread_has_freed_its_memory(
    checkpoint: Callable[..., Path],
) -> None:
    """Else the thread is inside torch when the interpreter is finalised, which aborts."""
    run = subprocess.run(
        [sys.executable, "-c", FREEING, checkpoint()], capture_output=True, text=True
    )
    assert run.returncode == 3, run.stderr


def test_a_refused_session_decodes_no_recording(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loud_rig = Rig(load("base"), ScriptedBackend(num_slots=1), max_waiting=0)
    plain = Voice(torch.randn(128))
    cloned = Voice(plain.x_vector, torch.zeros(3, 16, dtype=torch.long), "Hi.")
    loud_rig.backend.endless = True
    session = loud_rig.open(voice=plain)
    with monkeypatch.context() as patch:
        patch.setattr(loud_rig.engine, "_state_after", lambda *_: pytest.fail("it was decoded"))
        with pytest.raises(EngineBusyError):
            loud_rig.open(voice=cloned)
    session.cancel()
    loud_rig.engine.close()


def test_text_after_the_end_is_refused_and_after_a_cancellation_ignored(loud_rig: Rig) -> None:
    session = loud_rig.open(None)
    session.end()
    with pytest.raises(TextError, match="was ended"):
        session.push_text("more")
    drain(session)
    session = loud_rig.open(None)
    session.cancel()
    session.push_text("more")
    assert drain(session)[1].reason == "cancelled"


def test_asyncio_readers_do_not_block_the_event_loop(loud_rig: Rig) -> None:
    """A task advances while three readers wait for their first events."""
    loud_rig.backend.gate.clear()

    async def read_all(seed: int) -> int:
        session = loud_rig.open(seed=seed)
        return len([event async for event in session])

    async def main() -> list[int]:
        readers = [asyncio.create_task(read_all(seed)) for seed in range(3)]
        for _ in range(100):
            await asyncio.sleep(0)
        await asyncio.to_thread(loud_rig.hold)
        assert not any(reader.done() for reader in readers)
        loud_rig.resume()
        return await asyncio.gather(*readers)

    assert all(count > 2 for count in asyncio.run(main()))


def test_a_reader_whose_event_loop_is_closed_affects_no_other_session(loud_rig: Rig) -> None:
    loud_rig.backend.endless = True

    async def leave() -> Session:
        session = loud_rig.open(seed=1)
        async for _ in session:
            break
        return session

    session = asyncio.run(leave())
    session.cancel()
    loud_rig.backend.endless = False
    assert drain(loud_rig.open(seed=2))[1].reason == "eos"
    assert loud_rig.idle()


def test_random_reads_pauses_pushes_and_cancels_deliver_prefixes(loud_rig: Rig) -> None:
    """Six sessions on two slots, with stall timeouts between the actions."""
    rng = random.Random(0)
    open_sessions: dict[int, tuple[Session, list[AudioChunk], list[str]]] = {}
    for action in range(4000):
        if action >= 400 and loud_rig.backend.num_swapped_out > 10:
            break
        loud_rig.advance(0.3)
        loud_rig.settle()
        if len(open_sessions) < 6:
            portions = list(TEXT) if rng.random() < 0.5 else [TEXT]
            session = loud_rig.open(None, seed=action, largest=3, ahead=6)
            open_sessions[action] = session, [], portions
        seed = rng.choice(list(open_sessions))
        session, chunks, portions = open_sessions[seed]
        for _ in range(rng.choice((1, 10))):
            if portions:
                session.push_text(portions.pop(0))
        if not portions:
            session.end()
        event = session._events.get_nowait()
        if isinstance(event, AudioChunk):
            chunks.append(event)
        cancelled = rng.random() < 0.05
        if cancelled:
            session.cancel()
        if cancelled or isinstance(event, Finish):
            del open_sessions[seed]
            if chunks:
                num_frames = sum(len(chunk.codes) for chunk in chunks)
                np.testing.assert_array_equal(codes(chunks), scripted(seed, num_frames))
            assert cancelled or event == Finish("eos", loud_rig.num_frames)
    for session, _, _ in open_sessions.values():
        session.cancel()
    assert loud_rig.backend.num_swapped_out > 10
    assert loud_rig.idle()


def test_random_cancellations_deliver_prefixes(loud_rig: Rig) -> None:
    rng = random.Random(0)
    for _ in range(40):
        seed = rng.randrange(1000)
        session = loud_rig.open(seed=seed)
        stop = rng.choice([0, 1, 2, 99])
        got: list[AudioChunk] = []
        for event in session:
            if isinstance(event, AudioChunk):
                got.append(event)
            if len(got) >= stop:
                session.cancel()
        if got:
            np.testing.assert_array_equal(
                codes(got), scripted(seed, sum(len(c.codes) for c in got))
            )
    assert loud_rig.idle()


def test_a_session_can_be_read_by_a_second_iteration(loud_rig: Rig) -> None:
    """The first iteration is closed after the second has begun to wait."""

    async def read_all(session: Session) -> None:
        async for _ in session:
            pass

    async def main() -> Finish | None:
        session = loud_rig.open(None, seed=1)
        session.push_text("hello to ")
        events = session.__aiter__()
        await anext(events)
        listening, set_waiter = asyncio.Event(), session._events.set_waiter

        def observe(loop: asyncio.AbstractEventLoop, arrived: asyncio.Event) -> None:
            set_waiter(loop, arrived)
            listening.set()

        session._events.set_waiter = observe  # type: ignore[method-assign]
        rest = asyncio.ensure_future(read_all(session))
        await listening.wait()
        await events.aclose()
        session.push_text(TEXT)
        session.end()
        await asyncio.wait_for(rest, TIMEOUT_S)
        return session.finish

    finish = asyncio.run(main())
    assert finish is not None and finish.reason == "eos"


def test_closing_an_idle_engine_never_hangs(load: Callable[..., LoadedModel]) -> None:
    """The signal to stop is not lost while the loop clears earlier ones."""
    loud_rig = Rig(load(), ScriptedBackend())
    wakeup = loud_rig.engine._loop.wakeup
    clear = wakeup.clear

    def stop_before() -> None:
        loud_rig.engine._loop.stop()
        clear()

    wakeup.clear = stop_before  # type: ignore[method-assign]
    wakeup.set()
    loud_rig.engine._thread.join(TIMEOUT_S)
    assert not loud_rig.engine._thread.is_alive()


def test_every_reader_gets_the_finish(loud_rig: Rig) -> None:
    session = loud_rig.open()
    readers = [threading.Thread(target=lambda: list(session)) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(TIMEOUT_S)
    assert not any(reader.is_alive() for reader in readers)


def test_text_pushed_after_the_finish_is_dropped(loud_rig: Rig) -> None:
    loud_rig.backend.failing_steps = {13: 0}
    session = loud_rig.open(None, seed=13)
    session.push_text("hello to ")
    assert drain(session)[1].reason == "error"
    session.push_text("more text. " * 100)
    session.end()
    assert session._text.front() is None


def test_text_queued_before_the_session_opens_is_spoken(loud_rig: Rig) -> None:
    text_queue = TextQueue(loud_rig.loaded.tokenizer, Splitter())
    text_queue.push(TEXT)
    text_queue.end()
    prefix = loud_rig.engine.prompt_builder.prefix("ryan", "english", None)
    loud_rig.settle()
    session = loud_rig.engine.open(
        text_queue, prefix, None, "full", Sampling(seed=1), ChunkPolicy()
    )
    assert drain(session)[1].reason == "eos"


def test_a_session_can_be_finalised_within_any_code(
    loud_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector may run the finaliser on the engine thread, which then holds any lock."""
    loud_rig.backend.endless = True
    sessions = [loud_rig.open(None, seed=9)]
    wakeup = loud_rig.engine._loop.wakeup
    clear = wakeup.clear

    def collect() -> None:
        with loud_rig.engine._loop.scheduler.lock:
            sessions.clear()
        clear()

    monkeypatch.setattr(wakeup, "clear", collect)
    loud_rig.backend.endless = False
    assert drain(loud_rig.open(seed=2))[1].reason == "eos"
    assert loud_rig.idle()


def test_a_backend_that_cannot_release_a_slot_leaves_no_session_waiting(
    load: Callable[..., LoadedModel],
) -> None:
    backend = ScriptedBackend()

    def fail(slot: int) -> None:
        raise OSError("lost the device")

    backend.release = fail  # type: ignore[method-assign]
    loud_rig = Rig(load(), backend)
    for session in [loud_rig.open(seed=i) for i in range(4)]:
        session_reader = threading.Thread(target=drain, args=(session,), daemon=True)
        session_reader.start()
        session_reader.join(TIMEOUT_S)
        assert not session_reader.is_alive()
    loud_rig.engine.close()
