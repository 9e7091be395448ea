import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable

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
from megakernel_tts.loader import Loaded
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.text_queue import TextQueue
from tests.fakes import ScriptedBackend
from tests.rig import TEXT, Rig, codes, drain, scripted


def test_cancelled_is_a_prefix_and_frees_the_slot(rig: Rig) -> None:
    rig.backend.endless = True
    for wanted in (1, 2, 5):
        session = rig.open(seed=3)
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
        assert rig.idle()


def test_cancel_takes_effect_within_a_frame(rig: Rig) -> None:
    rig.backend.endless = True
    session = rig.open()
    next(iter(session))
    rig.backend.gate.clear()
    time.sleep(0.02)
    before = len(rig.backend.batches)
    session.cancel()
    rig.backend.gate.set()
    assert rig.idle()
    assert len(rig.backend.batches) - before <= 1


def test_cancel_before_the_start_and_while_waiting(rig: Rig) -> None:
    rig.backend.endless = True
    speaking = [rig.open(seed=i) for i in range(2)]
    waiting = rig.open(seed=9)
    waiting.cancel()
    assert drain(waiting) == ([], Finish("cancelled", 0))
    for session in speaking:
        session.cancel()
    assert rig.idle()


def test_leaving_or_dropping_a_session_cancels_it(rig: Rig) -> None:
    rig.backend.endless = True
    with rig.open() as session:
        next(iter(session))
    assert rig.idle()
    session = rig.open()
    next(iter(session))
    del session
    gc.collect()
    assert rig.idle()


def test_a_full_queue_refuses_with_a_sentence(load: Callable[..., Loaded]) -> None:
    rig = Rig(load(), ScriptedBackend(num_slots=1), max_waiting=2)
    rig.backend.endless = True
    sessions = [rig.open(seed=i) for i in range(3)]
    with pytest.raises(EngineBusyError, match="3 sessions are open"):
        rig.open()
    sessions[0].cancel()
    rig.open().cancel()  # a cancelled session's place is free at once
    rig.engine.close()


def test_a_broken_engine_tells_everyone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.backend.gate.clear()
    session = rig.open()
    time.sleep(0.05)
    monkeypatch.setattr(
        rig.engine._loop.sounding, "decode", lambda due: (_ for _ in ()).throw(SystemError("bug"))
    )
    rig.backend.gate.set()
    _, finish = drain(session)
    assert finish.reason == "error" and "bug" in str(finish.error)
    with pytest.raises(EngineClosedError):
        rig.open()


def test_closing_ends_every_session(load: Callable[..., Loaded]) -> None:
    rig = Rig(load(), ScriptedBackend())
    rig.backend.endless = True
    sessions = [rig.open(seed=i) for i in range(5)]
    rig.engine.close()
    rig.engine.close()
    assert all(list(session)[-1] == session.finish for session in sessions)
    assert {s.finish.reason for s in sessions if s.finish} == {"cancelled"}
    with pytest.raises(EngineClosedError):
        rig.open()


def test_closing_waits_for_the_thread(load: Callable[..., Loaded]) -> None:
    rig = Rig(load(), ScriptedBackend())
    rig.backend.endless = True
    session = rig.open()
    next(iter(session))
    rig.engine.close()
    assert not rig.engine._thread.is_alive()


def test_an_engine_that_nobody_holds_ends(load: Callable[..., Loaded]) -> None:
    """Its thread ends, and what it held is freed; a session that is held keeps it alive."""
    rig = Rig(load(), ScriptedBackend())
    rig.backend.endless = True
    session = rig.open()
    thread, loop = rig.engine._thread, weakref.ref(rig.engine._loop)
    del rig
    gc.collect()
    for _ in range(3):
        assert isinstance(next(iter(session)), AudioChunk)
    del session
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    gc.collect()
    assert loop() is None


def test_a_voice_is_not_primed_for_a_session_that_is_refused(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(load("base"), ScriptedBackend(num_slots=1), max_waiting=0)
    plain = Voice(torch.randn(128))
    cloned = Voice(plain.x_vector, torch.zeros(3, 16, dtype=torch.long), "Hi.")
    rig.backend.endless = True
    session = rig.open(voice=plain)
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "_primed", lambda voice: pytest.fail("primed in vain"))
        with pytest.raises(EngineBusyError):
            rig.open(voice=cloned)
    session.cancel()
    rig.engine.close()


def test_text_after_the_end_is_refused_and_after_cancel_ignored(rig: Rig) -> None:
    session = rig.open(None)
    session.end()
    with pytest.raises(TextError, match="was ended"):
        session.push_text("more")
    drain(session)
    session = rig.open(None)
    session.cancel()
    session.push_text("more")
    assert drain(session)[1].reason == "cancelled"


def test_asyncio_readers_do_not_block_the_loop(rig: Rig) -> None:
    rig.backend.gate.clear()

    async def read(seed: int) -> int:
        session = rig.open(seed=seed)
        return len([e async for e in session])

    async def tick() -> float:
        threading.Timer(0.2, rig.backend.gate.set).start()
        worst, last = 0.0, time.perf_counter()
        for _ in range(40):
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
        return worst

    async def main() -> tuple[float, list[int]]:
        readers = [asyncio.create_task(read(seed)) for seed in range(3)]
        worst = await tick()
        return worst, await asyncio.gather(*readers)

    worst, counts = asyncio.run(main())
    assert all(count > 2 for count in counts)
    assert worst < 0.15


def test_a_reader_whose_event_loop_is_gone_harms_nobody(rig: Rig) -> None:
    rig.backend.endless = True

    async def leave() -> Session:
        session = rig.open(seed=1)
        async for _ in session:
            break
        return session

    session = asyncio.run(leave())
    session.cancel()
    rig.backend.endless = False
    assert drain(rig.open(seed=2))[1].reason == "eos"
    assert rig.idle()


def test_random_sessions_side_by_side(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads, pauses, pushes, cancels in any order: what is heard is always a stream's prefix."""
    monkeypatch.setattr("megakernel_tts.engine.loop._PATIENCE", 0.001)
    rng = random.Random(0)
    open_ones: dict[int, tuple[Session, list[AudioChunk], list[str]]] = {}
    for step in range(4000):
        if step >= 400 and rig.backend.suspended > 10:  # a busy machine needs more steps
            break
        time.sleep(0.005)
        if len(open_ones) < 6:
            text = list(TEXT) if rng.random() < 0.5 else [TEXT]
            session = rig.open(None, seed=step, largest=3, ahead=6)
            open_ones[step] = session, [], text
        seed = rng.choice(list(open_ones))
        session, heard, left = open_ones[seed]
        for _ in range(rng.choice((1, 10))):
            if left:
                session.push_text(left.pop(0))
        if not left:
            session.end()
        event = session._mailbox.take()
        if isinstance(event, AudioChunk):
            heard.append(event)
        cancelled = rng.random() < 0.05
        if cancelled:
            session.cancel()
        if cancelled or isinstance(event, Finish):
            del open_ones[seed]
            if heard:
                np.testing.assert_array_equal(
                    codes(heard), scripted(seed, sum(len(c.codes) for c in heard))
                )
            assert cancelled or event == Finish("eos", rig.frames)
    for session, _, _ in open_ones.values():
        session.cancel()
    assert rig.backend.suspended > 10
    assert rig.idle()


def test_random_joins_leaves_and_cancels(rig: Rig) -> None:
    rng = random.Random(0)
    for _ in range(40):
        seed = rng.randrange(1000)
        session = rig.open(seed=seed)
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
    assert rig.idle()


def test_a_session_may_be_read_again_by_another_loop_of_the_same_task(rig: Rig) -> None:
    """The first reader is closed some time after the second has begun to wait."""

    async def read() -> Finish | None:
        session = rig.open(None, seed=1)
        session.push_text("hello to ")
        async for _ in session:
            break
        rest = asyncio.ensure_future(_all(session))
        await asyncio.sleep(0.05)
        session.push_text(TEXT)
        session.end()
        await asyncio.wait_for(rest, 10)
        return session.finish

    async def _all(session: Session) -> None:
        async for _ in session:
            pass

    finish = asyncio.run(read())
    assert finish is not None and finish.reason == "eos"


def test_closing_an_idle_engine_never_hangs(load: Callable[..., Loaded]) -> None:
    """The ring that tells of the end is not lost while the loop forgets earlier ones."""
    rig = Rig(load(), ScriptedBackend())
    wakeup = rig.engine._loop.wakeup
    clear = wakeup.clear

    def stop_before() -> None:
        rig.engine._loop.stop()
        clear()

    wakeup.clear = stop_before  # type: ignore[method-assign]
    wakeup.set()
    rig.engine._thread.join(10)
    assert not rig.engine._thread.is_alive()


def test_the_finish_is_told_to_every_reader(rig: Rig) -> None:
    session = rig.open()
    readers = [threading.Thread(target=lambda: list(session)) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(10)
    assert not any(reader.is_alive() for reader in readers)


def test_text_pushed_after_the_finish_is_forgotten(rig: Rig) -> None:
    rig.backend.poisoned = {13: 0}
    session = rig.open(None, seed=13)
    session.push_text("hello to ")
    assert drain(session)[1].reason == "error"
    session.push_text("more text. " * 100)
    session.end()
    assert session._script.front() is None


def test_text_that_is_there_before_the_session_is_spoken(rig: Rig) -> None:
    script = TextQueue(rig.loaded.tokenizer, Splitter())
    script.push(TEXT)
    script.end()
    prefix = rig.engine.prompt_builder.prefix("ryan", "english", None)
    time.sleep(0.05)  # the engine sleeps
    session = rig.engine.open(script, prefix, None, "full", Sampling(seed=1), ChunkPolicy())
    assert drain(session)[1].reason == "eos"


def test_a_session_may_be_dropped_within_any_code(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector may run the finaliser in the engine's thread, whatever it holds at that time."""
    rig.backend.endless = True
    sessions = [rig.open(None, seed=9)]
    wakeup = rig.engine._loop.wakeup
    clear = wakeup.clear

    def collect() -> None:
        with rig.engine._loop.lock:
            sessions.clear()
        clear()

    monkeypatch.setattr(wakeup, "clear", collect)
    rig.backend.endless = False
    assert drain(rig.open(seed=2))[1].reason == "eos"
    assert rig.idle()


def test_a_backend_that_cannot_release_hangs_nobody(load: Callable[..., Loaded]) -> None:
    backend = ScriptedBackend()

    def fail(slot: int) -> None:
        raise OSError("lost the device")

    backend.release = fail  # type: ignore[method-assign]
    rig = Rig(load(), backend)
    for session in [rig.open(seed=i) for i in range(4)]:
        session_reader = threading.Thread(target=drain, args=(session,), daemon=True)
        session_reader.start()
        session_reader.join(10)
        assert not session_reader.is_alive()
    rig.engine.close()
