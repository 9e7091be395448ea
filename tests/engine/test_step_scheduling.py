"""The lengths of the loop's steps; chunks and interruptions do not change codes."""

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from megakernel_tts import AudioChunk, ChunkPolicy, Finish, Sampling, Session
from megakernel_tts.backends.protocol import Frames
from megakernel_tts.backends.reference import Reference
from megakernel_tts.engine import guard
from megakernel_tts.engine.engine import Engine
from megakernel_tts.loader import LoadedModel
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.text_queue import TextQueue
from tests.align.synthetic_attention import LoudDecoder
from tests.rig import TEXT, Rig, codes, drain, scripted


class ReferenceEngine:
    """An engine of its own over the reference backend; only its codes are compared."""

    def __init__(self, loaded: LoadedModel, num_slots: int) -> None:
        backend, self.loaded = loaded.engine.backend, loaded
        assert isinstance(backend, Reference)
        prompt_builder = loaded.engine.prompt_builder
        reference = Reference(
            backend.model,
            loaded.config,
            prompt_builder.pad[0],
            num_slots=num_slots,
            max_positions=256,
        )
        self.engine = Engine(reference, prompt_builder, LoudDecoder())

    def open(self, sampling: Sampling, chunks: ChunkPolicy) -> Session:
        prefix = self.engine.prompt_builder.prefix("ryan", "english", None)
        text_queue = TextQueue(self.loaded.tokenizer, Splitter())
        return self.engine.open(text_queue, prefix, None, "streaming", sampling, chunks)

    def say(self, text: str, sampling: Sampling, chunks: ChunkPolicy) -> np.ndarray:
        session = self.open(sampling, chunks)
        session.push_text(text)
        session.end()
        return codes(drain(session)[0])


def test_chunks_other_streams_and_live_text_do_not_change_codes(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With frame limits and the guard, while sessions are opened and cancelled."""
    monkeypatch.setattr(guard, "_GRACE_FRAMES", 20)  # ends the speech earlier
    reference = ReferenceEngine(load(size="1b7", shallow=True), num_slots=4)
    samplings = [
        Sampling(seed=1, max_frames=30),
        Sampling(seed=2),  # until the guard ends it
        Sampling(seed=3, max_frames=13, guard=False),
    ]
    texts = ["hello to you", "hi", TEXT]
    solo = [
        reference.say(text, sampling, ChunkPolicy(1, 1))
        for text, sampling in zip(texts, samplings, strict=True)
    ]
    assert len(solo[1]) > 30 and [len(solo[0]), len(solo[2])] == [30, 13]

    def write(session: Session, text: str) -> None:
        for char in text:
            session.push_text(char)
        session.end()

    def read(session: Session, chunks: list[AudioChunk]) -> None:
        for event in session:
            if isinstance(event, AudioChunk):
                chunks.append(event)
                with reference.open(Sampling(seed=9), ChunkPolicy(1, 1)) as other:
                    other.push_text("one two ")
                    if len(chunks) % 3 == 0:
                        next(iter(other))

    for first, largest in ((1, 7), (16, 64)):
        sessions = [reference.open(s, ChunkPolicy(first, largest)) for s in samplings]
        delivered: list[list[AudioChunk]] = [[] for _ in sessions]
        threads = [
            threading.Thread(target=target, args=pair)
            for target, arguments in ((write, texts), (read, delivered))
            for pair in zip(sessions, arguments, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for chunks, expected in zip(delivered, solo, strict=True):
            np.testing.assert_array_equal(codes(chunks), expected)
    reference.engine.close()


def test_a_step_lasts_until_the_first_chunk_is_due(loud_rig: Rig) -> None:
    for first, largest, lengths in ((1, 4, [1, 2, 4, 4]), (3, 3, [3, 3, 3])):
        loud_rig.backend.step_lengths.clear()
        drain(loud_rig.open(first=first, largest=largest))
        assert loud_rig.backend.step_lengths[: len(lengths)] == lengths
    loud_rig.backend.step_lengths.clear()
    drain(loud_rig.open(first=8, largest=8, max_frames=10))
    assert loud_rig.backend.step_lengths == [8, 2]


def test_the_reader_and_the_text_limit_a_step(loud_rig: Rig) -> None:
    loud_rig.backend.endless = True
    lagging = loud_rig.open(seed=1, first=4, largest=4, ahead=6)
    session = loud_rig.open(None, seed=2, first=8, largest=8)
    session.push_text("hello to ")
    assert isinstance(next(iter(session)), AudioChunk)
    loud_rig.settle()
    assert loud_rig.backend.step_lengths[-1] <= 2
    assert loud_rig.backend.num_frames(0) == 6, "frames that may be unread"
    lagging.cancel()


def test_a_new_session_waits_for_at_most_one_frame(loud_rig: Rig) -> None:
    loud_rig.backend.endless = True
    loud_rig.backend.gate.clear()
    speaking = loud_rig.open(seed=0, first=100, largest=100)
    loud_rig.hold()
    assert loud_rig.backend.step_lengths == [100]
    loud_rig.backend.events.clear()
    opened = loud_rig.open(seed=1)
    loud_rig.resume()
    assert isinstance(next(iter(opened)), AudioChunk)
    assert loud_rig.backend.events.index("prefill") <= 1
    speaking.cancel()


def test_text_interrupts_a_step_only_for_a_stream_that_lacks_it(loud_rig: Rig) -> None:
    dry = loud_rig.open(None, seed=1)
    dry.push_text("hello to ")
    next(iter(dry))
    loud_rig.settle()
    assert loud_rig.streams[0].starved
    speaking = loud_rig.open(None, seed=2, first=100, largest=100)
    loud_rig.settle()
    loud_rig.backend.step_lengths.clear()
    loud_rig.backend.gate.clear()
    speaking.push_text(TEXT)
    loud_rig.hold()
    assert loud_rig.backend.step_lengths[0] > 5, "all of its text in one step"
    speaking.push_text(" And more.")
    assert not loud_rig.backend.interrupted
    opened = loud_rig.open(None, seed=3)
    full = loud_rig.open(None, seed=4, layout="full")
    full.push_text("hello to ")
    assert not loud_rig.backend.interrupted, "there is nothing to speak yet"
    dry.push_text("the world and more ")
    assert loud_rig.backend.interrupted
    loud_rig.resume()
    assert isinstance(next(iter(dry)), AudioChunk)
    for session in (dry, speaking, opened, full):
        session.cancel()


def test_interruptions_do_not_change_codes(loud_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)

    def interrupt_at_random() -> None:
        if rng.random() < 0.5:
            loud_rig.engine._loop.interrupts.interrupt()

    monkeypatch.setattr(loud_rig.backend, "_pass_gate", interrupt_at_random)
    chunks, _ = drain(loud_rig.open(seed=4, first=100, largest=100))
    np.testing.assert_array_equal(codes(chunks), scripted(4, loud_rig.num_frames))
    assert len(loud_rig.backend.step_lengths) > 5


@pytest.mark.parametrize("num_frames", [41, 42, 43, 44])
def test_streams_that_began_at_different_times_share_long_steps(
    loud_rig: Rig, num_frames: int
) -> None:
    """Chunks that are due within a step wait for its end; their sizes stay the same."""
    loud_rig.backend.endless = True
    loud_rig.backend.gate.clear()
    sessions = [loud_rig.open(seed=0, layout="full", first=4, largest=4, max_frames=num_frames)]
    loud_rig.hold()
    sessions += [loud_rig.open(seed=1, layout="full", first=4, largest=4, max_frames=num_frames)]
    loud_rig.resume()
    for seed, session in enumerate(sessions):
        chunks, _ = drain(session)
        np.testing.assert_array_equal(codes(chunks), scripted(seed, num_frames))
        assert {len(chunk.codes) for chunk in chunks[:-1]} == {4}
        assert len(chunks[-1].codes) <= 4
    lengths = loud_rig.backend.step_lengths
    assert 1 in lengths[:5] and set(lengths[-8:-1]) == {4}, "first chunks do not wait"


def begin_together(loud_rig: Rig, limits: list[int]) -> list[Session]:
    """Opens streams of so many frames in chunks of eight, whose prompts share a prefill."""
    sessions = [
        loud_rig.open(None, seed=seed, layout="full", first=8, largest=8, max_frames=limit)
        for seed, limit in enumerate(limits)
    ]
    with loud_rig.paused():
        for session in sessions:
            session.push_text(TEXT)
            session.end()
    return sessions


def test_a_stream_that_reaches_its_limit_does_not_shorten_a_step(loud_rig: Rig) -> None:
    """Its frames beyond the limit are dropped."""
    loud_rig.backend.endless = True
    limits = [41, 10, 22]
    for seed, session in enumerate(begin_together(loud_rig, limits)):
        chunks, finish = drain(session)
        assert finish == Finish("length", limits[seed])
        np.testing.assert_array_equal(codes(chunks), scripted(seed, limits[seed]))
    assert loud_rig.backend.step_lengths == [8, 8, 8, 8, 8, 1]
    assert loud_rig.idle()


def test_a_stream_that_has_ended_finishes_beside_the_next_step(loud_rig: Rig) -> None:
    loud_rig.backend.endless = True
    ended, speaking = begin_together(loud_rig, [8, 400])
    assert isinstance(next(iter(ended)), AudioChunk)
    loud_rig.hold()
    assert drain(ended)[1] == Finish("length", 8)  # while a step of the other is under way
    loud_rig.resume()
    speaking.cancel()


@pytest.mark.parametrize("others_wait", [True, False], ids=["another waits", "no step follows"])
def test_a_stream_that_ends_with_more_than_a_chunk_delivers_all_of_it(
    loud_rig: Rig, monkeypatch: pytest.MonkeyPatch, others_wait: bool
) -> None:
    """Its slot is needed, or nothing else is made, after the first of its last two chunks."""
    loud_rig.backend.endless = True
    num_steps, step = 0, loud_rig.backend.step

    def interrupted(
        slots: Sequence[int], num_frames: int, overlap: Callable[[], object], _: object
    ) -> Sequence[Frames]:
        """Ends the second step after a frame, and lets no chunk begin early."""
        nonlocal num_steps
        num_steps += 1
        return step(slots, 1 if num_steps == 2 else num_frames, overlap)

    monkeypatch.setattr(loud_rig.backend, "step", interrupted)
    # After 1, 2 and 4 frames, of which one and then three are pending.
    sessions = [loud_rig.open(None, seed=0, layout="full", first=1, largest=2, max_frames=4)]
    max_frames, num_others = (20, 2) if others_wait else (4, 1)
    for seed in range(1, 1 + num_others):
        other = loud_rig.open(None, seed, "full", max_frames=max_frames, first=8, largest=8)
        sessions.append(other)
    with loud_rig.paused():
        for session in sessions:
            session.push_text(TEXT)
            session.end()
    chunks, finish = drain(sessions[0])
    assert finish == Finish("length", 4)
    np.testing.assert_array_equal(codes(chunks), scripted(0, 4))
    assert [len(chunk.codes) for chunk in chunks] == [1, 2, 1]
