import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator

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
)
from megakernel_tts.codec.decoder import State
from megakernel_tts.engine import Engine
from megakernel_tts.loader import Loaded
from megakernel_tts.prompt import Layout
from megakernel_tts.script import Script
from megakernel_tts.split import Limits, Splitter
from tests.fakes import ScriptedBackend, codes_of

TEXT = "hello to the world, this is a test of speech."


class Rig:
    """An engine over a scripted backend."""

    def __init__(self, loaded: Loaded, backend: ScriptedBackend, waiting: int = 64) -> None:
        self.loaded = loaded
        self.backend = backend
        self.engine = Engine(
            backend, loaded.engine.prompter, loaded.engine.decoder, waiting=waiting
        )

    def open(
        self,
        text: str | None = TEXT,
        seed: int = 1,
        layout: Layout = "streaming",
        limits: Limits | None = None,
        **chunks: int,
    ) -> Session:
        prefix = self.engine.prompter.prefix("ryan", "english", None)
        script = Script(self.loaded.tokenizer, Splitter(limits=limits))
        sampling = Sampling(seed=seed, max_frames=400)
        session = self.engine.open(script, prefix, None, layout, sampling, ChunkPolicy(**chunks))
        if text is not None:
            session.push_text(text)
            session.end()
        return session

    @property
    def frames(self) -> int:
        """Frames that TEXT takes."""
        return len(self.loaded.tokenizer.encode(TEXT)) + self.backend.tail

    def idle(self) -> bool:
        """Whether every slot comes free soon."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if not self.backend.busy and not self.engine.sessions:
                return True
            time.sleep(0.005)
        return False


@pytest.fixture
def rig(load: Callable[..., Loaded]) -> Iterator[Rig]:
    one = Rig(load(), ScriptedBackend())
    yield one
    one.backend.gate.set()
    one.engine.close()


def drain(session: Session) -> tuple[list[AudioChunk], Finish]:
    *chunks, finish = list(session)
    assert isinstance(finish, Finish)
    return [c for c in chunks if isinstance(c, AudioChunk)], finish


def codes(chunks: list[AudioChunk]) -> np.ndarray:
    return np.concatenate([c.codes for c in chunks])


def scripted(seed: int, frames: int) -> np.ndarray:
    return torch.stack([codes_of(seed, i) for i in range(frames)]).numpy()


def test_frames_arrive_in_order_and_complete(rig: Rig) -> None:
    chunks, finish = drain(rig.open(seed=7))
    assert finish == Finish("eos", rig.frames)
    np.testing.assert_array_equal(codes(chunks), scripted(7, rig.frames))
    assert [c.frame for c in chunks] == list(np.cumsum([0, *(len(c.codes) for c in chunks)])[:-1])
    assert all(len(c.pcm) == 1920 * len(c.codes) for c in chunks)
    assert rig.idle()


def test_chunks_grow_to_their_bound(rig: Rig) -> None:
    chunks, _ = drain(rig.open(first=1, largest=4))
    sizes = [len(c.codes) for c in chunks]
    assert sizes[:4] == [1, 2, 4, 4]
    assert max(sizes) == 4
    even, _ = drain(rig.open(first=3, largest=3))
    assert {len(c.codes) for c in even[:-1]} == {3}


def test_streamed_pcm_equals_whole_for_any_chunks(rig: Rig) -> None:
    """The codes are equal; samples within one 16-bit step (sums are ordered by chunk length)."""
    whole = np.concatenate([c.pcm for c in drain(rig.open(first=100, largest=100))[0]])
    for first, largest in ((1, 1), (1, 8), (5, 7)):
        chunks, _ = drain(rig.open(first=first, largest=largest))
        pcm = np.concatenate([c.pcm for c in chunks])
        assert np.abs(pcm.astype(int) - whole).max() <= 1


def test_more_streams_than_slots_all_finish(rig: Rig) -> None:
    sessions = [rig.open(seed=seed) for seed in range(7)]
    for seed, session in enumerate(sessions):
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.frames))
    assert max(rig.backend.batches) == 2
    assert rig.idle()
    assert len(rig.backend.threads) == 1


def test_live_text_waits_and_never_pads(rig: Rig) -> None:
    session = rig.open(None)
    events = iter(session)
    session.push_text("hello ")
    first = next(events)
    assert isinstance(first, AudioChunk)
    seen = len(first.codes)
    before = len(rig.backend.batches)
    time.sleep(0.05)
    # The prompt holds the one token there is; frame 1 would need the next.
    assert len(rig.backend.batches) - before <= 1
    for char in TEXT[len("hello ") :]:
        session.push_text(char)
        time.sleep(0.001)
    session.end()
    rest = [e for e in events if isinstance(e, AudioChunk)]
    assert seen + sum(len(c.codes) for c in rest) == rig.frames
    np.testing.assert_array_equal(codes([first, *rest]), scripted(1, rig.frames))


def test_a_live_stream_that_runs_dry_gives_out_what_it_has(rig: Rig) -> None:
    session = rig.open(None, first=8, largest=8)
    session.push_text("hello to the ")
    event = next(iter(session))
    assert isinstance(event, AudioChunk)
    assert len(event.codes) < 8


def test_waiting_for_text_holds_up_nobody(rig: Rig) -> None:
    idle = [rig.open(None, seed=50 + i) for i in range(5)]
    for session in idle[:1]:
        session.push_text("hello ")
    assert drain(rig.open())[1].reason == "eos"
    for session in idle:
        session.cancel()
    assert rig.idle()


def test_no_text_at_all_ends_at_once(rig: Rig) -> None:
    for text in ("", "  \n "):
        assert drain(rig.open(text)) == ([], Finish("eos", 0))


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


def test_a_consumer_that_stops_reading_stops_its_stream_alone(rig: Rig) -> None:
    rig.backend.endless = True
    lazy = rig.open(seed=1, largest=4, ahead=10)
    time.sleep(0.3)
    made = sum(rig.backend.batches)
    assert made <= 10
    rig.backend.endless = False
    assert drain(rig.open(seed=2))[1].reason == "eos"
    chunks, finish = drain(lazy)
    assert finish.reason == "eos"
    np.testing.assert_array_equal(codes(chunks), scripted(1, finish.frames))


def test_a_full_queue_refuses_with_a_sentence(load: Callable[..., Loaded]) -> None:
    rig = Rig(load(), ScriptedBackend(slots=1), waiting=2)
    rig.backend.endless = True
    sessions = [rig.open(seed=i) for i in range(3)]
    with pytest.raises(EngineBusyError, match="3 sessions are open"):
        rig.open()
    sessions[0].cancel()
    rig.open().cancel()  # a cancelled session's place is free at once
    rig.engine.close()


def test_a_failing_stream_ends_alone(rig: Rig) -> None:
    rig.backend.poisoned = {13}
    good, bad = rig.open(seed=1), rig.open(seed=13)
    chunks, finish = drain(bad)
    assert (chunks, finish.reason) == ([], "error")
    assert "poisoned seed 13" in str(finish.error)
    chunks, finish = drain(good)
    assert finish.reason == "eos"
    np.testing.assert_array_equal(codes(chunks), scripted(1, rig.frames))
    assert drain(rig.open(seed=2))[1].reason == "eos"
    assert rig.idle()


def test_a_failing_decoder_ends_its_stream_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = rig.engine.decoder.decode
    marked = codes_of(66, 4)

    def fail(frames: torch.Tensor, state: object) -> object:
        if (frames == marked).all(dim=-1).any():
            raise ArithmeticError("out of luck")
        return decode(frames, state)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.engine.decoder, "decode", fail)
    bad, good = rig.open(seed=66), rig.open(seed=1)
    assert drain(bad)[1].reason == "error"
    assert drain(good)[1].reason == "eos"


def test_a_broken_engine_tells_everyone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.backend.gate.clear()
    session = rig.open()
    time.sleep(0.05)
    monkeypatch.setattr(
        rig.engine, "_decode", lambda due: (_ for _ in ()).throw(SystemError("bug"))
    )
    rig.backend.gate.set()
    _, finish = drain(session)
    assert finish.reason == "error" and "bug" in str(finish.error)
    with pytest.raises(EngineClosedError):
        rig.open()


def test_runaway_is_stopped_and_reported(rig: Rig) -> None:
    rig.backend.endless = True
    _, finish = drain(rig.open("hello."))
    assert finish.reason == "guard"
    assert finish.frames < 150
    assert rig.idle()


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


def test_long_text_is_spoken_piece_by_piece(rig: Rig) -> None:
    """Each piece starts its own prompt; frames and their numbers go on."""
    text = " ".join(f"Sentence number {i} is here to be said." for i in range(40))
    for layout in ("full", "streaming"):
        rig.backend.prompts.clear()
        chunks, finish = drain(rig.open(text, seed=5, layout=layout))
        assert finish.reason == "eos"
        assert len(rig.backend.prompts) >= 6
        np.testing.assert_array_equal(codes(chunks), scripted(5, finish.frames))
    assert rig.idle()


def test_a_hundred_thousand_characters_are_spoken_to_the_end(rig: Rig) -> None:
    sentence = "Every one of these sentences is to be spoken, in its own place and to its end. "
    text = sentence * (100_000 // len(sentence))
    session = rig.open(text, seed=5, layout="full", first=8, largest=8)
    frames = sum(len(e.codes) for e in session if isinstance(e, AudioChunk))
    assert session.finish == Finish("eos", frames)
    assert len(rig.backend.prompts) > 300
    assert frames == rig.backend.tail * len(rig.backend.prompts)


def test_full_layout_takes_a_whole_piece_into_the_prompt(rig: Rig) -> None:
    session = rig.open(None, layout="full", limits=Limits(hard=1))
    session.push_text("hello to you. And")
    first = next(iter(session))
    assert isinstance(first, AudioChunk)
    ids = rig.loaded.tokenizer.encode("hello to you.")
    prefix = rig.engine.prompter.prefix("ryan", "english", None)
    assert rig.backend.prompts == [len(prefix.vectors) + len(ids) + 2]
    session.end()
    drain(session)
    assert len(rig.backend.prompts) == 2


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


def test_long_texts_take_turns_with_short_ones(load: Callable[..., Loaded]) -> None:
    """With one slot a short text waits for a piece of the long one, not for its end."""
    rig = Rig(load(), ScriptedBackend(slots=1))
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
    rig = Rig(load(), ScriptedBackend(slots=1))
    live = rig.open(None, layout="full", limits=Limits(hard=1))
    live.push_text("hello to you. And then")
    next(iter(live))
    assert drain(rig.open(seed=5))[1].reason == "eos"
    live.end()
    assert drain(live)[1].reason == "eos"
    rig.engine.close()


def test_the_guard_ends_at_the_same_frame_for_any_chunks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.backend.endless = True
    decode = rig.engine.decoder.decode

    def hush(frames: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        wave, after = decode(frames, state)
        return 0 * wave, after

    monkeypatch.setattr(rig.engine.decoder, "decode", hush)
    finishes = set()
    for first, largest in ((1, 1), (1, 8), (8, 8), (3, 100)):
        chunks, finish = drain(rig.open("hello to you.", first=first, largest=largest))
        np.testing.assert_array_equal(codes(chunks), scripted(1, finish.frames))
        finishes.add(finish)
    assert finishes == {Finish("guard", finish.frames)}


def test_the_finish_is_told_to_every_reader(rig: Rig) -> None:
    session = rig.open()
    readers = [threading.Thread(target=lambda: list(session)) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(10)
    assert not any(reader.is_alive() for reader in readers)


def test_text_pushed_after_the_finish_is_forgotten(rig: Rig) -> None:
    rig.backend.poisoned = {13}
    session = rig.open(None, seed=13)
    session.push_text("hello to ")
    assert drain(session)[1].reason == "error"
    session.push_text("more text. " * 100)
    session.end()
    assert session._script.front() is None


def test_text_that_is_there_before_the_session_is_spoken(rig: Rig) -> None:
    script = Script(rig.loaded.tokenizer, Splitter())
    script.push(TEXT)
    script.end()
    prefix = rig.engine.prompter.prefix("ryan", "english", None)
    time.sleep(0.05)  # the engine sleeps
    session = rig.engine.open(script, prefix, None, "full", Sampling(seed=1), ChunkPolicy())
    assert drain(session)[1].reason == "eos"


def test_a_session_may_be_dropped_within_any_code(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector may run the finaliser in the engine's thread, whatever it holds at that time."""
    rig.backend.endless = True
    sessions = [rig.open(None, seed=9)]
    bell = rig.engine._bell
    clear = bell.clear

    def collect() -> None:
        with rig.engine._lock:
            sessions.clear()
        clear()

    monkeypatch.setattr(bell, "clear", collect)
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


def test_a_slot_that_comes_free_wakes_whoever_waits_for_it(load: Callable[..., Loaded]) -> None:
    """The one who waits stands before the one who leaves, and nothing else moves."""
    rig = Rig(load(), ScriptedBackend(slots=1))
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
