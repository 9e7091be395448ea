"""However many frames a step is asked for, a stream's codes are the same; it ends when it must."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megakernel_tts import AudioChunk, ChunkPolicy, Sampling
from megakernel_tts.backends.protocol import Backend, Frames, PrefillRequest
from megakernel_tts.backends.reference import Reference
from megakernel_tts.engine.engine import Engine
from megakernel_tts.loader import Loaded
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.text_queue import TextQueue
from tests.comparison import SAMPLINGS, MakeComparison
from tests.rig import TEXT, Rig, codes, drain, one_frame, scripted


@dataclass
class Speaker:
    """A stream, its text, and what it has said."""

    prompt: Tensor
    text: Tensor
    sampling: Sampling
    cap: int
    said: list[list[int]] = field(default_factory=list[list[int]])
    fed: int = 0
    ended: bool = False

    def start(self, slot: int) -> PrefillRequest:
        """All of its prompt but the end is kept for the next time."""
        return PrefillRequest(slot, self.prompt, self.sampling, num_common=len(self.prompt) - 1)

    @property
    def ready(self) -> bool:
        return len(self.said) <= self.fed or self.fed == len(self.text)

    def feed(self, backend: Backend, slot: int, count: int) -> None:
        new = self.text[self.fed : self.fed + count]
        self.fed += len(new)
        backend.feed(slot, new, self.fed == len(self.text))

    def take(self, frames: Frames) -> None:
        self.said += frames.codes.tolist()
        self.ended = frames.ended


def frame_by_frame(backend: Backend, speakers: list[Speaker]) -> list[list[list[int]]]:
    """What each says, one frame a step, all of its text there from the start."""
    for slot, speaker in enumerate(speakers):
        backend.prefill([speaker.start(slot)])
        speaker.feed(backend, slot, len(speaker.text))
    said: list[list[list[int]]] = [[] for _ in speakers]
    running = set(range(len(speakers)))
    while running:
        slots = sorted(running)
        for slot, frame in zip(slots, one_frame(backend, slots), strict=True):
            if frame is not None:
                said[slot].append(frame.tolist())
            if frame is None or len(said[slot]) == speakers[slot].cap:
                backend.release(slot)
                running.remove(slot)
    return said


def play(backend: Backend, speakers: list[Speaker], rng: random.Random, most: int) -> None:
    """Steps of any length; who joins, gets text, is interrupted, is cut off or leaves is random."""
    waiting, free = list(speakers), rng.sample(range(backend.num_slots), backend.num_slots)
    running: dict[int, Speaker] = {}
    while waiting or running:
        while waiting and free and (not running or rng.random() < 0.5):
            speaker, slot = waiting.pop(), free.pop()
            backend.prefill([speaker.start(slot)])
            running[slot] = speaker
        for slot, speaker in running.items():
            if rng.random() < 0.5 or not any(s.ready for s in running.values()):
                speaker.feed(backend, slot, rng.randint(1, 4))
        ready = [slot for slot, speaker in running.items() if speaker.ready]
        slots = rng.sample(ready, rng.randint(1, len(ready)))
        asked = min([rng.randint(1, most), *(running[i].cap - len(running[i].said) for i in slots)])
        interrupted = rng.random() < 0.25
        if interrupted:
            backend.interrupt()
        for slot, frames in zip(slots, backend.step(slots, asked), strict=True):
            assert 1 <= len(frames.codes) + frames.ended <= (1 if interrupted else asked)
            speaker = running[slot]
            speaker.take(frames)
            if speaker.ended or len(speaker.said) == speaker.cap or rng.random() < 0.05:
                backend.release(slot)
                free.append(slot)
                del running[slot]
        backend.clear_interrupt()


def check(backend: Any, speakers: list[Speaker], plays: int, most: int) -> None:
    """Random plays against frame by frame; one of the codes stands for the end of speech."""
    first = frame_by_frame(backend, [replace(s) for s in speakers])
    early = {said[i][0] for said in first for i in range(2)}
    eos = next(frame[0] for said in first for frame in said[2:] if frame[0] not in early)
    talker = backend._config.talker
    control = replace(talker.control, eos=eos)
    backend._config = replace(backend._config, talker=replace(talker, control=control))
    whole = frame_by_frame(backend, [replace(s) for s in speakers])
    assert any(len(said) < speaker.cap for said, speaker in zip(whole, speakers, strict=True))
    rng = random.Random(0)
    for _ in range(plays):
        fresh = [replace(s, said=[]) for s in speakers]
        play(backend, fresh, rng, most)
        for speaker, said in zip(fresh, whole, strict=True):
            assert speaker.said and speaker.said == said[: len(speaker.said)]
            assert not speaker.ended or len(speaker.said) == len(said) < speaker.cap


def _speakers(prompt: Tensor, text: Tensor, caps: list[int]) -> list[Speaker]:
    """Of different lengths, with different samplings."""
    return [
        Speaker(prompt[i:].contiguous(), text[: len(text) - i], SAMPLINGS[i % 3], cap)
        for i, cap in enumerate(caps)
    ]


def test_any_steps_of_the_reference_give_the_same_codes(
    comparison: MakeComparison,
) -> None:
    b = comparison("1b7")
    reference = Reference(b.exact.model, b.config, b.pad.float(), num_slots=4, max_positions=64)
    speakers = _speakers(b.prompt.float(), b.text.float().repeat(3, 1), [12, 3, 17, 9])
    check(reference, speakers, plays=8, most=9)


def test_any_steps_of_the_kernel_give_the_same_codes(
    any_comparison: MakeComparison,
) -> None:
    b = any_comparison("0b6")
    check(b.kernel, _speakers(b.prompt, b.text, [5, 2, 4]), plays=1, most=4)


@pytest.mark.gpu
def test_any_steps_on_a_gpu_give_the_same_codes(gpu_comparison: MakeComparison) -> None:
    """More of it than the emulator can do."""
    for size, most in (("0b6", 40), ("1b7", 5)):
        b = gpu_comparison(size)
        speakers = _speakers(b.prompt, b.text.repeat(3, 1), [17, 3, 26, 40])
        check(b.kernel, speakers, plays=20, most=most)


def test_a_launch_ends_where_its_text_does(any_comparison: MakeComparison) -> None:
    """All blocks know how many frames there are, and the next launch goes on from there."""
    b = any_comparison("0b6")
    b.begin(0, 0)
    whole = b.kernel.step([0], 3)[0].codes
    b.kernel.release(0)
    b.kernel.prefill([PrefillRequest(0, b.prompt, SAMPLINGS[0])])
    b.kernel.feed(0, b.text[:1], False)
    (before,) = b.kernel.step([0], 4)
    assert (len(before.codes), before.ended) == (2, False)
    b.kernel.feed(0, b.text[1:2], False)
    (after,) = b.kernel.step([0], 4)
    assert torch.equal(torch.cat([before.codes, after.codes]), whole)


def test_an_interruption_ends_a_launch_under_way(any_comparison: MakeComparison) -> None:
    """Within a frame of the flag, whatever was asked for; and it leaves no trace."""
    b = any_comparison("0b6")
    kernel, most = b.kernel, 30
    b.begin(0, 0)
    whole = kernel.step([0], most)[0].codes if b.pad.is_cuda else None
    kernel.release(0)
    b.begin(0, 0)
    kernel._buffers.num_published[:] = 0
    made: list[Frames] = []
    launch = threading.Thread(target=lambda: made.extend(kernel.step([0], most)))
    launch.start()
    while kernel._buffers.num_published[0] == 0:
        time.sleep(0)
    seen = int(kernel._buffers.num_published[0])
    kernel.interrupt()
    launch.join(60)
    count = len(made[0].codes)
    assert seen <= count <= seen + 2 < most
    kernel.clear_interrupt()
    made += kernel.step([0], 2)
    ours = torch.cat([frames.codes for frames in made])
    if whole is None:  # the emulator is slow
        kernel.release(0)
        b.begin(0, 0)
        whole = kernel.step([0], len(ours))[0].codes
    assert torch.equal(ours, whole[: len(ours)])


def test_what_is_asked_beyond_the_slot_is_refused(comparison: MakeComparison) -> None:
    b = comparison("1b7")
    b.exact.prefill([PrefillRequest(0, b.prompt.float()[:1].repeat(60, 1), SAMPLINGS[0])])
    b.exact.feed(0, b.text.float()[:0], True)
    assert len(b.exact.step([0], 9)[0].codes) == 4
    with pytest.raises(ValueError, match="Slot 0 is full: it has 64 positions"):
        b.exact.step([0], 1)


# --- the loop ---


class Spoken:
    """An engine of its own over a reference, with as many slots as one likes."""

    def __init__(self, loaded: Loaded, slots: int) -> None:
        backend, self.loaded = loaded.engine.backend, loaded
        assert isinstance(backend, Reference)
        prompt_builder = loaded.engine.prompt_builder
        self.reference = Reference(
            backend.model, loaded.config, prompt_builder.pad[0], num_slots=slots, max_positions=256
        )
        self.engine = Engine(self.reference, prompt_builder, loaded.engine.decoder)

    def open(self, sampling: Sampling, chunks: ChunkPolicy):
        prefix = self.engine.prompt_builder.prefix("ryan", "english", None)
        script = TextQueue(self.loaded.tokenizer, Splitter())
        return self.engine.open(script, prefix, None, "streaming", sampling, chunks)

    def say(self, text: str, sampling: Sampling, chunks: ChunkPolicy) -> np.ndarray:
        session = self.open(sampling, chunks)
        session.push_text(text)
        session.end()
        return codes(drain(session)[0])


def test_streams_are_the_same_for_any_chunks_company_and_news(load: Callable[..., Loaded]) -> None:
    """Live text, caps, the guard and cancels beside them, in steps of any length."""
    spoken = Spoken(load(size="1b7"), slots=3)
    samplings = [
        Sampling(seed=1, max_frames=30),
        Sampling(seed=2),  # until the guard ends it
        Sampling(seed=3, max_frames=13, guard=False),
    ]
    texts = ["hello to you", "hi", TEXT]
    alone = [
        spoken.say(text, sampling, ChunkPolicy(1, 1))
        for text, sampling in zip(texts, samplings, strict=True)
    ]
    assert len(alone[1]) > 60 and [len(alone[0]), len(alone[2])] == [30, 13]
    rng, done = random.Random(0), threading.Event()

    def disturb() -> None:
        while not done.wait(0.01):
            session = spoken.open(Sampling(seed=9), ChunkPolicy(1, 1))
            session.push_text("one two ")
            if rng.random() < 0.5:
                next(iter(session))
            session.cancel()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    for first, largest in ((1, 8), (5, 7), (16, 64)):
        sessions = [spoken.open(s, ChunkPolicy(first, largest)) for s in samplings]
        heard: list[list[AudioChunk]] = [[] for _ in sessions]

        def write(session: Any, text: str) -> None:
            for char in text:
                session.push_text(char)
                time.sleep(0.002)
            session.end()

        writers = [
            threading.Thread(target=write, args=pair) for pair in zip(sessions, texts, strict=True)
        ]
        for writer in writers:
            writer.start()
        heard = [drain(session)[0] for session in sessions]
        for chunks, expected in zip(heard, alone, strict=True):
            np.testing.assert_array_equal(codes(chunks), expected)
    done.set()
    disturber.join()
    spoken.engine.close()


def test_a_step_lasts_until_the_first_chunk_is_due(rig: Rig) -> None:
    for first, largest, asked in ((1, 4, [1, 2, 4, 4]), (3, 3, [3, 3, 3])):
        rig.backend.asked.clear()
        drain(rig.open(first=first, largest=largest))
        assert rig.backend.asked[: len(asked)] == asked
    rig.backend.asked.clear()
    drain(rig.open(first=8, largest=8, max_frames=10))
    assert rig.backend.asked == [8, 2]


def test_a_reader_and_a_text_that_stop_bound_a_step(rig: Rig) -> None:
    rig.backend.endless = True
    lazy = rig.open(seed=1, first=4, largest=4, ahead=6)
    session = rig.open(None, seed=2, first=8, largest=8)
    session.push_text("hello to ")
    assert isinstance(next(iter(session)), AudioChunk)
    time.sleep(0.1)
    assert sum(rig.backend.asked[-1:]) <= 2
    assert rig.backend._streams[0]["frames"] == 6  # what `ahead` allows
    lazy.cancel()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


def _frames_until(rig: Rig, event: str, news: Callable[[], object]) -> int:
    """Frames made after the one at hand, once there is news, before an event."""
    rig.backend.gate.clear()
    time.sleep(0.05)  # the loop waits within a frame
    seen = len(rig.backend.events)
    news()
    rig.backend.gate.set()
    _until(lambda: event in rig.backend.events[seen:])
    return rig.backend.events[seen:].index(event)


def test_a_new_session_waits_for_one_frame_of_the_others(rig: Rig) -> None:
    rig.backend.endless = True
    next(iter(rig.open(seed=0, first=100, largest=100)))
    opened: list[Any] = []
    assert _frames_until(rig, "prefill", lambda: opened.append(rig.open(seed=1))) <= 1
    assert isinstance(next(iter(opened[0])), AudioChunk)


def test_text_wakes_whoever_has_none_and_disturbs_nobody_else(rig: Rig) -> None:
    dry = rig.open(None, seed=1)
    dry.push_text("hello to ")
    next(iter(dry))
    _until(lambda: rig.engine._loop.streams[0].starved)
    speaking = rig.open(None, seed=2, first=100, largest=100)
    rig.backend.asked.clear()
    rig.backend.gate.clear()
    speaking.push_text(TEXT)
    _until(lambda: bool(rig.backend.asked))
    assert rig.backend.asked[0] > 5  # its text, all of it in one step
    speaking.push_text(" And more.")
    assert not rig.backend._interrupted
    dry.push_text("the world and more ")
    assert rig.backend._interrupted
    rig.backend.gate.set()
    assert isinstance(next(iter(dry)), AudioChunk)
    for session in (dry, speaking):
        session.cancel()


def test_interrupted_streams_say_what_they_would_have_said(rig: Rig) -> None:
    session = rig.open(seed=4, first=100, largest=100)
    rng = random.Random(0)
    for _ in range(30):
        time.sleep(0.001 * rng.random())
        rig.engine._loop.interrupt()
    np.testing.assert_array_equal(codes(drain(session)[0]), scripted(4, rig.frames))
