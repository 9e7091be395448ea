"""The loop: frames, chunks, segments, failures, retries and the guard, over a scripted backend."""

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
from megakernel_tts.loader import LoadedModel
from megakernel_tts.text.pace import ordinary_frames
from megakernel_tts.text.splitter import SplitLimits
from tests.fakes import ScriptedBackend, codes_of
from tests.rig import TEXT, Rig, codes, drain, scripted


def test_every_frame_is_delivered_in_order(rig: Rig) -> None:
    chunks, finish = drain(rig.open(seed=7))
    assert finish == Finish("eos", rig.num_frames)
    np.testing.assert_array_equal(codes(chunks), scripted(7, rig.num_frames))
    assert [c.frame for c in chunks] == list(np.cumsum([0, *(len(c.codes) for c in chunks)])[:-1])
    assert all(len(c.pcm) == 1920 * len(c.codes) for c in chunks)
    # A chunk that the reader keeps must not keep the whole batch.
    assert all(c.pcm.base is None and c.codes.base is None for c in chunks)
    assert rig.idle()


def test_chunks_double_up_to_the_largest(rig: Rig) -> None:
    chunks, _ = drain(rig.open(first=1, largest=4))
    sizes = [len(c.codes) for c in chunks]
    assert sizes[:4] == [1, 2, 4, 4]
    assert max(sizes) == 4
    even, _ = drain(rig.open(first=3, largest=3))
    assert {len(c.codes) for c in even[:-1]} == {3}


def test_chunk_sizes_do_not_change_samples(rig: Rig) -> None:
    """Samples are equal within one 16-bit step: the order of sums depends on the chunk length."""
    whole = np.concatenate([c.pcm for c in drain(rig.open(first=100, largest=100))[0]])
    for first, largest in ((1, 1), (1, 8), (5, 7)):
        chunks, _ = drain(rig.open(first=first, largest=largest))
        pcm = np.concatenate([c.pcm for c in chunks])
        assert np.abs(pcm.astype(int) - whole).max() <= 1


def test_live_text_is_never_padded(rig: Rig) -> None:
    """A stream makes no frame whose text has not arrived."""
    session = rig.open(None)
    events = iter(session)
    session.push_text("hello ")
    first = next(events)
    assert isinstance(first, AudioChunk)
    rig.settle()
    # The prompt holds the only token; frame 1 needs the next one.
    assert rig.backend.batch_sizes == [1]
    for char in TEXT[len("hello ") :]:
        session.push_text(char)
        rig.settle()
    session.end()
    rest = [e for e in events if isinstance(e, AudioChunk)]
    assert len(first.codes) + sum(len(c.codes) for c in rest) == rig.num_frames
    np.testing.assert_array_equal(codes([first, *rest]), scripted(1, rig.num_frames))


def test_a_stream_without_further_text_delivers_its_pending_frames(rig: Rig) -> None:
    session = rig.open(None, first=8, largest=8)
    session.push_text("hello to the ")
    event = next(iter(session))
    assert isinstance(event, AudioChunk)
    assert len(event.codes) < 8


def test_flushed_text_is_spoken_to_its_end_and_later_text_is_the_next_segment(rig: Rig) -> None:
    tokens = [
        len(rig.loaded.tokenizer.encode(text)) for text in ("hello to the world.", "this is a test")
    ]
    session = rig.open(text=None, first=1, largest=1)
    session.push_text("hello to the world.")
    rig.settle()
    assert session._events.num_unread < tokens[0], "frames before the end of the text"
    session.flush()
    rig.settle()
    assert session._events.num_unread == tokens[0] + rig.backend.tail
    assert not rig.backend.busy, "the segment has ended"
    session.flush()
    session.push_text(" this is")
    rig.settle()
    session.push_text(" a test")
    session.end()
    session.flush()  # has no effect
    chunks, finish = drain(session)
    assert finish.reason == "eos"
    first, second = (count + rig.backend.tail for count in tokens)
    assert len(rig.backend.prompts) == 2
    expected = [scripted(1, first), scripted(1, second, first + 1)]
    assert np.array_equal(codes(chunks), np.concatenate(expected))
    segments = [chunk.segment for chunk in chunks for _ in chunk.codes]
    assert segments == [0] * first + [1] * second


def test_streams_without_text_do_not_delay_others(rig: Rig) -> None:
    idle = [rig.open(None, seed=50 + i) for i in range(5)]
    for session in idle[:1]:
        session.push_text("hello ")
    assert drain(rig.open())[1].reason == "eos"
    for session in idle:
        session.cancel()
    assert rig.idle()


def test_an_empty_text_ends_at_once(rig: Rig) -> None:
    for text in ("", "  \n "):
        assert drain(rig.open(text)) == ([], Finish("eos", 0))


def test_each_segment_has_its_own_prompt_and_random_numbers(loud_rig: Rig) -> None:
    text = " ".join(f"Sentence number {i} is here to be said." for i in range(40))
    for layout in ("full", "streaming"):
        loud_rig.backend.prompt_lengths.clear()
        chunks, finish = drain(loud_rig.open(text, seed=5, layout=layout))
        assert finish.reason == "eos"
        firsts = [
            first for _, first in loud_rig.backend.prompts[-len(loud_rig.backend.prompt_lengths) :]
        ]
        assert len(firsts) >= 6
        lengths = np.diff([*firsts, finish.frames + len(firsts)]) - 1
        spoken = [scripted(5, int(n), first) for n, first in zip(lengths, firsts, strict=True)]
        np.testing.assert_array_equal(codes(chunks), np.concatenate(spoken))
    assert loud_rig.idle()


def test_a_hundred_thousand_characters_are_spoken_to_the_end(loud_rig: Rig) -> None:
    sentence = "Every one of these sentences is to be spoken, in its own place and to its end. "
    text = sentence * (100_000 // len(sentence))
    session = loud_rig.open(text, seed=5, layout="full", first=8, largest=8)
    frames = sum(len(e.codes) for e in session if isinstance(e, AudioChunk))
    assert session.finish == Finish("eos", frames)
    assert len(loud_rig.backend.prompt_lengths) > 300
    assert frames == loud_rig.backend.tail * len(loud_rig.backend.prompt_lengths)


def test_the_full_layout_puts_a_whole_segment_into_the_prompt(rig: Rig) -> None:
    session = rig.open(None, layout="full", limits=SplitLimits(sentence=1))
    session.push_text("hello to you. And")
    first = next(iter(session))
    assert isinstance(first, AudioChunk)
    ids = rig.loaded.tokenizer.encode("hello to you.")
    prefix = rig.engine.prompt_builder.prefix("ryan", "english", None)
    assert rig.backend.prompt_lengths == [len(prefix.vectors) + len(ids) + 2]
    session.end()
    drain(session)
    assert len(rig.backend.prompt_lengths) == 2


def test_a_runaway_stream_ends_with_guard(rig: Rig) -> None:
    rig.backend.endless = True
    _, finish = drain(rig.open("hello."))
    assert finish.reason == "guard"
    assert finish.frames < 150
    assert rig.idle()


def test_chunk_sizes_do_not_change_where_the_guard_cuts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.backend.endless = True
    decode = rig.engine.decoder.decode

    def silent(frames: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        wave, after = decode(frames, state)
        return 0 * wave, after

    monkeypatch.setattr(rig.engine.decoder, "decode", silent)
    finishes = set()
    for first, largest in ((1, 1), (1, 8), (8, 8), (3, 100)):
        chunks, finish = drain(rig.open("hello to you.", first=first, largest=largest))
        np.testing.assert_array_equal(codes(chunks), scripted(1, finish.frames))
        finishes.add(finish)
    assert finishes == {Finish("guard", finish.frames)}


def test_a_failing_step_ends_no_other_stream(rig: Rig) -> None:
    rig.backend.failing_steps = {13: 0}
    good, bad = rig.open(seed=1), rig.open(seed=13)
    chunks, finish = drain(bad)
    assert (chunks, finish.reason) == ([], "error")
    assert "failing step of seed 13" in str(finish.error)
    chunks, finish = drain(good)
    assert finish.reason == "eos"
    np.testing.assert_array_equal(codes(chunks), scripted(1, rig.num_frames))
    assert drain(rig.open(seed=2))[1].reason == "eos"
    assert rig.idle()


def test_a_failing_decode_ends_no_other_stream(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its frames are in one batch with those of another stream."""
    decode, batch_sizes = rig.engine.decoder.decode, []
    marked = codes_of(66, 4)

    def fail(frames: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        if (frames == marked).all(dim=-1).any():
            batch_sizes.append(len(frames))
            raise ArithmeticError("the step failed")
        return decode(frames, state)

    monkeypatch.setattr(rig.engine.decoder, "decode", fail)
    bad, good = (rig.open(None, seed=seed, first=3, largest=3) for seed in (66, 1))
    for session in (bad, good):
        session.push_text("hello to ")
        next(iter(session))
    rig.settle()
    with rig.paused():
        for session in (bad, good):  # from here on they are stepped together
            session.push_text("the world, this is a test of speech and more ")
    for session in (bad, good):
        session.end()
    finish = drain(bad)[1]
    assert finish.reason == "error" and "the step failed" in str(finish.error)
    assert batch_sizes[0] == 2
    assert drain(good)[1].reason == "eos"


def test_a_reader_that_stops_pauses_its_stream_only(rig: Rig) -> None:
    rig.backend.endless = True
    lagging = rig.open(seed=1, largest=4, ahead=10)
    rig.settle()
    assert sum(rig.backend.batch_sizes) == 10
    rig.backend.endless = False
    assert drain(rig.open(seed=2))[1].reason == "eos"
    chunks, finish = drain(lagging)
    assert finish.reason == "eos"
    np.testing.assert_array_equal(codes(chunks), scripted(1, finish.frames))


def test_frames_made_before_a_failure_are_delivered(rig: Rig) -> None:
    rig.backend.failing_steps = {13: 5}
    chunks, finish = drain(rig.open(seed=13, first=8, largest=8))
    np.testing.assert_array_equal(codes(chunks), scripted(13, 5))
    assert (finish.reason, finish.frames) == ("error", 5)
    assert rig.idle()


def test_only_the_segment_that_ran_away_is_spoken_again(rig: Rig) -> None:
    """The first segment runs away with seed 5, is not delivered, and ends with seed 6."""
    text = "hello to you. And this is the other sentence of the two."
    rig.backend.runaway = {5}
    other = rig.open("hello.", seed=6, layout="full", max_retries=2)
    assert drain(other)[1] == Finish("eos", rig.backend.tail)
    rig.backend.prompts.clear()
    session = rig.open(text, seed=5, layout="full", limits=SplitLimits(sentence=1), max_retries=1)
    chunks, finish = drain(session)
    assert finish == Finish("eos", 2 * rig.backend.tail)
    assert [seed for seed, _ in rig.backend.prompts] == [5, 6, 5, 6]
    tail, later = rig.backend.tail, rig.backend.prompts[-1][1]
    np.testing.assert_array_equal(
        codes(chunks), np.concatenate([scripted(6, tail), scripted(6, tail, later)])
    )
    assert chunks[0].frame == 0
    assert sum(len(c.codes) for c in chunks) == finish.frames


def test_chunk_sizes_do_not_change_the_segment_after_a_runaway(loud_rig: Rig) -> None:
    """Frames that were cut off do not move the random numbers of the next segment."""
    loud_rig.backend.endless = True
    firsts: set[tuple[int, ...]] = set()
    for first, largest in ((1, 1), (8, 8), (3, 100)):
        loud_rig.backend.prompts.clear()
        text, sentences = "hello to you. And to you.", SplitLimits(sentence=1)
        session = loud_rig.open(text, limits=sentences, first=first, largest=largest, ahead=250)
        assert drain(session)[1].reason == "guard"
        firsts.add(tuple(number for _, number in loud_rig.backend.prompts))
    assert len(firsts) == 1


def test_a_segment_at_its_frame_limit_is_not_spoken_again(rig: Rig) -> None:
    session = rig.open("hello to the world", seed=5, max_frames=2, max_retries=3)
    assert drain(session)[1] == Finish("length", 2)
    assert rig.backend.prompts == [(5, 0)]


def test_the_last_attempt_is_delivered(rig: Rig) -> None:
    rig.backend.endless = True
    chunks, finish = drain(rig.open("hello.", seed=5, max_retries=2))
    assert [seed for seed, _ in rig.backend.prompts] == [5, 6, 7]
    assert finish.reason == "guard"
    np.testing.assert_array_equal(codes(chunks), scripted(7, finish.frames))


def test_the_finish_has_the_worst_outcome_of_all_segments(rig: Rig) -> None:
    text = "This first one is a sentence of many, many words indeed. Yes."
    chunks, finish = drain(rig.open(text, limits=SplitLimits(sentence=1), max_frames=12))
    assert len(rig.backend.prompt_lengths) == 2
    assert finish.reason == "length"
    assert 12 < sum(len(c.codes) for c in chunks) == finish.frames < 24


def test_the_guard_does_not_act_before_the_whole_text_was_fed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence far beyond the ordinary length does not end a stream while text is being fed."""
    decode = rig.engine.decoder.decode

    def silent(frames: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        wave, after = decode(frames, state)
        return 0 * wave, after

    monkeypatch.setattr(rig.engine.decoder, "decode", silent)
    text = "\ua66e" * 60  # three tokens a letter
    assert len(rig.loaded.tokenizer.encode(text)) > 2.5 * ordinary_frames(text)
    assert drain(rig.open(text))[1].reason == "eos"


def test_every_segment_starts_from_the_codec_state_after_the_recording(
    load: Callable[..., LoadedModel],
) -> None:
    rig = Rig(load("base"), ScriptedBackend())
    generator = torch.Generator().manual_seed(0)
    recording = torch.randint(0, 256, (70, 16), generator=generator)
    voice = Voice(torch.randn(128, generator=generator), recording, "Hello.")
    session = rig.open(
        "Hello to you. And to you.", layout="full", limits=SplitLimits(sentence=1), voice=voice
    )
    chunks, finish = drain(session)
    pcm = np.concatenate([c.pcm for c in chunks])
    decoder, tail = rig.engine.decoder, rig.backend.tail
    assert finish.frames == 2 * tail
    expected: list[np.ndarray] = []
    for segment in np.split(codes(chunks), 2):
        whole = torch.cat([recording, torch.from_numpy(segment)])[None]
        wave, _ = decoder.decode(whole, decoder.start())
        expected.append(pcm16(wave[0, -tail * decoder.samples_per_frame :].numpy()))
    assert np.abs(pcm.astype(int) - np.concatenate(expected)).max() <= 1
    rig.engine.close()


def test_a_transcript_longer_than_its_recording_is_fed_before_the_text(
    load: Callable[..., LoadedModel],
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


def test_live_text_with_a_recording_waits_until_it_is_as_long(
    load: Callable[..., LoadedModel],
) -> None:
    backend = ScriptedBackend()
    rig = Rig(load("base"), backend)
    voice = Voice(torch.randn(128), torch.zeros(12, 16, dtype=torch.long), "Hi.")
    session = rig.open(None, voice=voice)
    session.push_text("hello to ")
    rig.settle()
    assert not backend.prompt_lengths
    session.push_text("the world, this is a test of speech and more")
    assert isinstance(next(iter(session)), AudioChunk)
    rig.engine.close()
