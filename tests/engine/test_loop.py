import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megakernel_tts import (
    AudioChunk,
    Finish,
    Voice,
)
from megakernel_tts.audio import pcm16
from megakernel_tts.codec.decoder import State
from megakernel_tts.loader import Loaded
from megakernel_tts.text.pace import ordinary_frames
from megakernel_tts.text.splitter import Limits
from tests.fakes import ScriptedBackend, codes_of
from tests.rig import TEXT, Rig, codes, drain, scripted


def test_frames_arrive_in_order_and_complete(rig: Rig) -> None:
    chunks, finish = drain(rig.open(seed=7))
    assert finish == Finish("eos", rig.frames)
    np.testing.assert_array_equal(codes(chunks), scripted(7, rig.frames))
    assert [c.frame for c in chunks] == list(np.cumsum([0, *(len(c.codes) for c in chunks)])[:-1])
    assert all(len(c.pcm) == 1920 * len(c.codes) for c in chunks)
    # A chunk that is kept must not keep those of the whole batch.
    assert all(c.pcm.base is None and c.codes.base is None for c in chunks)
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


def test_long_text_is_spoken_piece_by_piece(rig: Rig) -> None:
    """Each piece starts its own prompt and draws with numbers that no other piece draws with."""
    text = " ".join(f"Sentence number {i} is here to be said." for i in range(40))
    for layout in ("full", "streaming"):
        rig.backend.prompts.clear()
        chunks, finish = drain(rig.open(text, seed=5, layout=layout))
        assert finish.reason == "eos"
        firsts = [first for _, first in rig.backend.starts[-len(rig.backend.prompts) :]]
        assert len(firsts) >= 6
        lengths = np.diff([*firsts, finish.frames + len(firsts)]) - 1
        spoken = [scripted(5, int(n), first) for n, first in zip(lengths, firsts, strict=True)]
        np.testing.assert_array_equal(codes(chunks), np.concatenate(spoken))
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
    prefix = rig.engine.prompt_builder.prefix("ryan", "english", None)
    assert rig.backend.prompts == [len(prefix.vectors) + len(ids) + 2]
    session.end()
    drain(session)
    assert len(rig.backend.prompts) == 2


def test_runaway_is_stopped_and_reported(rig: Rig) -> None:
    rig.backend.endless = True
    _, finish = drain(rig.open("hello."))
    assert finish.reason == "guard"
    assert finish.frames < 150
    assert rig.idle()


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


def test_a_failing_stream_ends_alone(rig: Rig) -> None:
    rig.backend.poisoned = {13: 0}
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
    """Also where its frames were decoded together with those of others."""
    decode, batches = rig.engine.decoder.decode, []
    marked = codes_of(66, 4)

    def fail(frames: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        if (frames == marked).all(dim=-1).any():
            batches.append(len(frames))
            raise ArithmeticError("out of luck")
        return decode(frames, state)

    monkeypatch.setattr(rig.engine.decoder, "decode", fail)
    bad, good = (rig.open(None, seed=seed, first=3, largest=3) for seed in (66, 1))
    for session in (bad, good):
        session.push_text("hello to ")
        next(iter(session))
    rig.backend.gate.clear()
    for session in (bad, good):  # from here on they move together
        session.push_text("the world, this is a test of speech and more ")
    time.sleep(0.05)
    rig.backend.gate.set()
    for session in (bad, good):
        session.end()
    finish = drain(bad)[1]
    assert finish.reason == "error" and "out of luck" in str(finish.error)
    assert batches[0] == 2
    assert drain(good)[1].reason == "eos"


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


def test_frames_made_before_a_failure_are_heard(rig: Rig) -> None:
    rig.backend.poisoned = {13: 5}
    chunks, finish = drain(rig.open(seed=13, first=8, largest=8))
    np.testing.assert_array_equal(codes(chunks), scripted(13, 5))
    assert (finish.reason, finish.frames) == ("error", 5)
    assert rig.idle()


def test_a_piece_that_runs_away_is_said_again_alone(rig: Rig) -> None:
    """The first piece runs away with seed 5 and ends with 6; nothing of the runaway is heard."""
    text = "hello to you. And this is the other sentence of the two."
    rig.backend.runaway = {5}
    calm = rig.open("hello.", seed=6, layout="full", retries=2)
    assert drain(calm)[1] == Finish("eos", rig.backend.tail)
    rig.backend.starts.clear()
    session = rig.open(text, seed=5, layout="full", limits=Limits(hard=1), retries=1)
    chunks, finish = drain(session)
    assert finish == Finish("eos", 2 * rig.backend.tail)
    assert [seed for seed, _ in rig.backend.starts] == [5, 6, 5, 6]
    tail, later = rig.backend.tail, rig.backend.starts[-1][1]
    np.testing.assert_array_equal(
        codes(chunks), np.concatenate([scripted(6, tail), scripted(6, tail, later)])
    )
    assert chunks[0].frame == 0
    assert sum(len(c.codes) for c in chunks) == finish.frames


def test_what_comes_after_a_runaway_is_the_same_for_any_chunks(rig: Rig) -> None:
    """Frames that were made and cut off do not move the random numbers of the next piece."""
    rig.backend.endless = True
    firsts: set[tuple[int, ...]] = set()
    for first, largest in ((1, 1), (8, 8), (3, 100)):
        rig.backend.starts.clear()
        text, sentences = "hello to you. And to you.", Limits(hard=1)
        session = rig.open(text, limits=sentences, first=first, largest=largest, ahead=250)
        assert drain(session)[1].reason == "guard"
        firsts.add(tuple(number for _, number in rig.backend.starts))
    assert len(firsts) == 1


def test_only_runaways_are_said_again(rig: Rig) -> None:
    session = rig.open("hello to the world", seed=5, max_frames=2, retries=3)
    assert drain(session)[1] == Finish("length", 2)
    assert rig.backend.starts == [(5, 0)]


def test_the_last_try_stands(rig: Rig) -> None:
    rig.backend.endless = True
    chunks, finish = drain(rig.open("hello.", seed=5, retries=2))
    assert [seed for seed, _ in rig.backend.starts] == [5, 6, 7]
    assert finish.reason == "guard"
    np.testing.assert_array_equal(codes(chunks), scripted(7, finish.frames))


def test_the_worst_piece_names_the_finish(rig: Rig) -> None:
    text = "This first one is a sentence of many, many words indeed. Yes."
    chunks, finish = drain(rig.open(text, limits=Limits(hard=1), max_frames=12))
    assert len(rig.backend.prompts) == 2
    assert finish.reason == "length"
    assert 12 < sum(len(c.codes) for c in chunks) == finish.frames < 24


def test_the_guard_waits_until_the_talker_has_the_whole_text(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence far beyond the ordinary length is no runaway while text is still being fed."""
    decode = rig.engine.decoder.decode

    def hush(frames: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        wave, after = decode(frames, state)
        return 0 * wave, after

    monkeypatch.setattr(rig.engine.decoder, "decode", hush)
    text = "\ua66e" * 60  # three tokens a letter
    assert len(rig.loaded.tokenizer.encode(text)) > 2.5 * ordinary_frames(text)
    assert drain(rig.open(text))[1].reason == "eos"


def test_every_piece_starts_after_the_voices_recording(load: Callable[..., Loaded]) -> None:
    """In-context: the codec hears the recording before each piece of the text."""
    rig = Rig(load("base"), ScriptedBackend())
    generator = torch.Generator().manual_seed(0)
    recording = torch.randint(0, 256, (70, 16), generator=generator)
    voice = Voice(torch.randn(128, generator=generator), recording, "Hello.")
    session = rig.open(
        "Hello to you. And to you.", layout="full", limits=Limits(hard=1), voice=voice
    )
    chunks, finish = drain(session)
    pcm = np.concatenate([c.pcm for c in chunks])
    decoder, tail = rig.engine.decoder, rig.backend.tail
    assert finish.frames == 2 * tail
    expected: list[np.ndarray] = []
    for piece in np.split(codes(chunks), 2):
        heard = torch.cat([recording, torch.from_numpy(piece)])[None]
        wave, _ = decoder.decode(heard, decoder.start())
        expected.append(pcm16(wave[0, -tail * decoder.frame :].numpy()))
    assert np.abs(pcm.astype(int) - np.concatenate(expected)).max() <= 1
    rig.engine.close()


def test_a_transcript_longer_than_its_recording_is_fed_before_the_text(
    load: Callable[..., Loaded],
) -> None:
    backend = ScriptedBackend()
    rig = Rig(load("base"), backend)
    transcript = "A transcript of many words beside very few frames."
    voice = Voice(torch.randn(128), torch.zeros(3, 16, dtype=torch.long), transcript)
    finish = drain(rig.open("Hello to you.", voice=voice))[1]
    encode = rig.loaded.tokenizer.encode
    beside = 1 + 3  # codec_bos and the frames
    left = len(encode(transcript)) - beside + len(encode("Hello to you.")) + 1
    assert finish == Finish("eos", left + backend.tail)
    rig.engine.close()


def test_live_text_beside_a_recording_waits_for_its_length(load: Callable[..., Loaded]) -> None:
    backend = ScriptedBackend()
    rig = Rig(load("base"), backend)
    voice = Voice(torch.randn(128), torch.zeros(12, 16, dtype=torch.long), "Hi.")
    session = rig.open(None, voice=voice)
    session.push_text("hello to ")
    time.sleep(0.05)
    assert not backend.prompts
    session.push_text("the world, this is a test of speech and more")
    assert isinstance(next(iter(session)), AudioChunk)
    rig.engine.close()
