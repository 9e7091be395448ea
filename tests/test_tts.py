import asyncio
import gc
import inspect
import json
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megakernel_tts import (
    TTS,
    AudioChunk,
    CheckpointError,
    ChunkPolicy,
    EngineClosedError,
    Finish,
    MegakernelTTSError,
    Sampling,
    Session,
    TextError,
    Voice,
)
from megakernel_tts.engine import guard
from megakernel_tts.text.tags import TAG
from tests.fakes import TIMEOUT_S

TEXT = "Hello to the world, this is speech."
SHORT = Sampling(seed=5, max_frames=8)


def codes_of(session: Session, portions: Sequence[str]) -> np.ndarray:
    """Codes [frames, groups] of a text that is pushed in portions."""
    for portion in portions:
        session.push_text(portion)
    session.end()
    return np.concatenate([e.codes for e in session if isinstance(e, AudioChunk)])


def test_the_seed_determines_the_codes(tts: TTS) -> None:
    one, two = tts.say(TEXT, sampling=SHORT), tts.say(TEXT, sampling=SHORT)
    np.testing.assert_array_equal(one.codes, two.codes)
    np.testing.assert_array_equal(one.pcm, two.pcm)
    other = tts.say(TEXT, sampling=replace(SHORT, seed=6))
    assert not np.array_equal(one.codes, other.codes)
    assert one.finish == "length"
    assert one.codes.shape == (8, 16) and one.pcm.shape == (8 * 1920,)
    assert (one.pcm.dtype, one.sample_rate, one.seconds) == (np.int16, 24_000, 8 * 0.08)


def test_warming_up_does_not_block_the_event_loop(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, seen = threading.Event(), list[bool]()

    async def warm(one: TTS) -> None:
        asyncio.get_running_loop().call_soon(running.set)
        await one.awarmup()

    warm_up = "megakernel_tts.tts.warm_up"
    monkeypatch.setattr(warm_up, lambda *_: seen.append(running.wait(TIMEOUT_S)))
    with TTS.load(checkpoint(shallow=True), device="cpu", slots=1) as one:
        asyncio.run(warm(one))
        assert one.warm and seen == [True]


def test_streaming_does_not_change_codes(tts: TTS) -> None:
    whole = tts.say(TEXT, "serena", "english", sampling=SHORT)
    policy = ChunkPolicy(first=2, largest=5)
    streamed = list(tts.stream(TEXT, "serena", "english", sampling=SHORT, chunks=policy))
    sizes = [len(chunk.codes) for chunk in streamed]
    assert sizes[0] == 2 and all(b <= min(2 * a, 5) for a, b in pairwise(sizes))
    np.testing.assert_array_equal(np.concatenate([c.codes for c in streamed]), whole.codes)
    pcm = np.concatenate([c.pcm for c in streamed]).astype(int)
    assert np.abs(pcm - whole.pcm).max() <= 1

    async def collect() -> list[AudioChunk]:
        return [c async for c in tts.astream(TEXT, "serena", "english", sampling=SHORT)]

    np.testing.assert_array_equal(
        np.concatenate([c.codes for c in asyncio.run(collect())]), whole.codes
    )


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
def test_only_long_texts_are_opened_on_another_thread(
    tts: TTS, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst of threads delays the event loop by more than tokenising short texts on it."""
    threads: list[int] = []
    open_session = tts.open

    def observed(*arguments: Any, **keywords: Any) -> Session:
        threads.append(threading.get_ident())
        return open_session(*arguments, **keywords)

    async def first(text: str) -> None:
        async for _ in tts.astream(text, sampling=SHORT):
            break

    monkeypatch.setattr(tts, "open", observed)
    asyncio.run(first("Hello. " * (200 if is_long else 1)))
    assert [thread != threading.get_ident() for thread in threads] == [is_long]


@pytest.mark.parametrize("layout", ["auto", "full", "streaming"])
def test_a_session_for_a_whole_text_has_the_codes_of_say(tts: TTS, layout: Any) -> None:
    session = tts.open(layout=layout, sampling=SHORT, text=TEXT)
    with pytest.raises(TextError, match="ended"):
        session.push_text("More.")
    codes = np.concatenate([e.codes for e in session if isinstance(e, AudioChunk)])
    np.testing.assert_array_equal(codes, tts.say(TEXT, layout=layout, sampling=SHORT).codes)
    with pytest.raises(TextError, match="empty"):
        tts.open(text=" ")


def test_an_engine_runs_until_it_is_closed(checkpoint: Callable[..., Path]) -> None:
    with TTS.load(checkpoint(shallow=True), device="cpu", slots=3) as one:
        assert one.running and one.slots == 3
    assert not one.running


@pytest.mark.parametrize("layout", ["full", "streaming"])
def test_pushing_single_characters_does_not_change_codes(tts: TTS, layout: str) -> None:
    text = "你好 to the world. It is e\u0301t\u0323e\u0301, don't you know? 3.14 👩\u200d👧!"
    results: list[np.ndarray] = []
    long = replace(SHORT, max_frames=20)  # of the streaming layout: a token of the text each
    for portions in ([text], list(text)):
        session = tts.open(layout=layout, sampling=long)  # type: ignore[arg-type]
        results.append(codes_of(session, portions))
    np.testing.assert_array_equal(results[0], results[1])


def test_concurrent_streams_do_not_change_codes(tts: TTS) -> None:
    """Seven streams on four slots, from threads: equal codes, samples within one 16-bit step."""
    jobs = [
        (f"Number {i} is speaking to you.", voice, Sampling(seed=i, max_frames=5 + i))
        for i, voice in enumerate(["ryan", "serena", "eric", "dylan", "ryan", "eric", "ryan"])
    ]
    solo = [tts.say(text, voice, sampling=sampling) for text, voice, sampling in jobs]
    together: dict[int, object] = {}

    def run(i: int) -> None:
        text, voice, sampling = jobs[i]
        together[i] = tts.say(text, voice, sampling=sampling)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, expected in enumerate(solo):
        np.testing.assert_array_equal(together[i].codes, expected.codes)  # type: ignore[attr-defined]
        difference = together[i].pcm.astype(int) - expected.pcm  # type: ignore[attr-defined]
        assert np.abs(difference).max() <= 1


def test_pushing_single_characters_after_a_transcript_does_not_change_codes(
    checkpoint: Callable[..., Path],
) -> None:
    """With transcripts that are longer and shorter than their recordings."""
    generator = torch.Generator().manual_seed(0)
    x_vector = torch.randn(128, generator=generator)
    with TTS.load(checkpoint("base", shallow=True), device="cpu", slots=2) as base:
        for frames, transcript in ((3, "A transcript of many words."), (40, "Hi.")):
            recording = torch.randint(0, 256, (frames, 16), generator=generator)
            voice = Voice(x_vector, recording, transcript)
            results: list[np.ndarray] = []
            for portions in ([TEXT], list(TEXT)):
                results.append(codes_of(base.open(voice, sampling=SHORT), portions))
            np.testing.assert_array_equal(results[0], results[1])
            plain = base.say(TEXT, Voice(x_vector), layout="streaming", sampling=SHORT)
            assert not np.array_equal(plain.codes, results[0])


def test_live_text_in_the_full_layout_is_spoken_sentence_by_sentence(tts: TTS) -> None:
    session = tts.open(layout="full", sampling=SHORT)
    session.push_text("Hello to you. And then")
    assert isinstance(next(iter(session)), AudioChunk)  # before the end of the text is known
    session.cancel()


def test_a_model_without_references_is_freed(checkpoint: Callable[..., Path]) -> None:
    one = TTS.load(checkpoint(shallow=True), device="cpu", slots=1)
    stream = one.stream(TEXT)
    thread = one._loaded.engine._thread
    talker = weakref.ref(one._loaded.engine.backend)
    del one
    gc.collect()
    next(stream)  # the stream keeps the engine
    del stream
    gc.collect()
    thread.join(10)
    gc.collect()
    assert not thread.is_alive() and talker() is None


@pytest.fixture
def early_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard allows short texts no additional frames."""
    monkeypatch.setattr(guard, "_GRACE_FRAMES", 0)


def test_a_retry_uses_the_next_seed(tts: TTS, early_guard: None) -> None:
    endless = Sampling(seed=3, temperature=1e-6)  # never samples the end of speech
    again = tts.say("A.", sampling=endless, retries=1)
    assert again.finish == "guard"
    np.testing.assert_array_equal(again.codes, tts.say("A.", sampling=endless.next_seed()).codes)


def test_the_guard_can_be_switched_off(tts: TTS, early_guard: None) -> None:
    frames = 40
    assert len(tts.say("Hi.", sampling=Sampling(seed=1, temperature=1e-6)).codes) < frames
    off = Sampling(seed=1, temperature=1e-6, guard=False, max_frames=frames)
    assert len(tts.say("Hi.", sampling=off).codes) == frames


def test_a_full_slot_ends_the_speech_with_length(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megakernel_tts.loader.MAX_POSITIONS", 40)
    with TTS.load(checkpoint(shallow=True), device="cpu", slots=1) as small:
        speech = small.say("Hi.", sampling=Sampling(seed=1, temperature=1e-6, guard=False))
        assert speech.finish == "length" and len(speech.codes) < 40
        with pytest.raises(MegakernelTTSError, match="positions"):
            small.say("word " * 60)
        assert small.say("Hi.", sampling=SHORT).finish == "length"


def test_positions_of_prompts_between_frames_can_be_set(checkpoint: Callable[..., Path]) -> None:
    with TTS.load(checkpoint(), device="cpu", prefill_positions=7) as tts:
        assert tts._loaded.engine._loop.scheduler.policy.prefill_budget_positions == 7


def test_describe_needs_no_weights(checkpoint: Callable[..., Path]) -> None:
    info = TTS.describe(checkpoint())
    assert info.kind == "custom_voice" and not info.takes_instruct and info.note is None
    assert info.voices["ryan"] == info.languages
    assert info.voices["eric"][0] == "sichuan_dialect"
    assert TTS.describe(checkpoint("base")).voices == {}
    assert "small demonstration voice" in str(TTS.describe().note)


def test_two_models_in_one_process_do_not_affect_each_other(
    tts: TTS, checkpoint: Callable[..., Path]
) -> None:
    expected = tts.say(TEXT, sampling=SHORT).codes
    with TTS.load(checkpoint("voice_design", "1b7", shallow=True), device="cpu", slots=1) as other:
        assert len(other.say(TEXT, instruct="low", sampling=SHORT).codes) == 8
        np.testing.assert_array_equal(tts.say(TEXT, sampling=SHORT).codes, expected)
    np.testing.assert_array_equal(tts.say(TEXT, sampling=SHORT).codes, expected)


@pytest.mark.parametrize(("kind", "size"), [("base", "0b6"), ("voice_design", "1b7")])
def test_warmup_runs_on_every_kind_of_model(
    checkpoint: Callable[..., Path], kind: str, size: str
) -> None:
    with TTS.load(checkpoint(kind, size, shallow=True), device="cpu", slots=1) as one:
        one.warmup()
        one.close()
    voice = Voice(torch.zeros(128)) if kind == "base" else None
    with pytest.raises(EngineClosedError, match="is closed"):
        one.say(TEXT, voice, instruct="x" if kind == "voice_design" else None)


def test_defaults_come_from_the_checkpoint(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint(), tmp_path / "model"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.5, "subtalker_dosample": False}))
    with TTS.load(folder, device="cpu", slots=1) as one:
        assert one.sampling == Sampling(temperature=0.5, predictor_temperature=0.0)
    file.write_text(json.dumps({"temperature": -2}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature is -2"):
        TTS.load(folder, device="cpu")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"generation_config\.json: the file is missing"):
        TTS.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "choose auto, cpu, cuda"),
        ({"device": "meta"}, "choose auto, cpu, cuda"),
        ({"dtype": "float16"}, "choose auto, bfloat16 or float32"),
        ({"dtype": 5}, "dtype is 5; choose auto, bfloat16 or float32"),
        ({"slots": 0}, "at least one stream"),
        ({"slots": 10**7}, r"slots is 10000000; each takes \d+ MiB, and cpu has \d+ GiB"),
        ({"slots": 10**30}, r"slots is 10{30}; each takes"),
        ({"prefill_positions": 0}, "0 positions of prompts between two frames are too few"),
    ],
)
def test_invalid_load_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TTS.load(**{"device": "cpu"} | arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model", 5, "a folder or a hub id"),
        ("slots", "8", "a whole number"),
        ("slots", 2.0, "a whole number"),
        ("slots", True, "a whole number"),
        ("slots", None, "a whole number"),
        ("prefill_positions", 2.0, "a whole number or None"),
        ("device", 5, "auto, cpu, cuda or cuda:N"),
        ("device", None, "auto, cpu, cuda or cuda:N"),
    ],
)
def test_load_arguments_of_a_wrong_type_are_named(name: str, value: object, expected: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} is {value!r}; it must be .*{expected}"):
        TTS.load(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("text", None, "The text must be a string, found NoneType"),
        ("voice", 5, "voice is of type int; it must be a name or a Voice"),
        ("language", None, "language is None; it must be auto or a language's name"),
        ("language", 5, "language is 5; it must be"),
        ("instruct", 5, "instruct must be a string, found int"),
        ("instruct", 0, "instruct must be a string, found int"),
        ("instruct", "\ud800", "instruct has the lone surrogate"),
        ("layout", None, "layout is None; choose"),
        ("sampling", {}, "sampling is {}; it must be a Sampling"),
        ("sampling", 0, "sampling is 0; it must be a Sampling"),
        ("chunks", 8, "chunks is 8; it must be a ChunkPolicy"),
        ("chunks", (), r"chunks is \(\); it must be a ChunkPolicy"),
        ("retries", "1", "retries is '1'; it must be a whole number"),
        ("retries", True, "retries is True; it must be a whole number"),
    ],
)
def test_arguments_of_a_wrong_type_are_named_at_the_call(
    tts: TTS, name: str, value: object, expected: str
) -> None:
    every = (partial(tts.say, text=TEXT), partial(tts.stream, text=TEXT), tts.open)
    parameters = [(call, inspect.signature(call).parameters.get(name)) for call in every]
    calls = [call for call, parameter in parameters if parameter and parameter.default is not value]
    assert calls
    for call in calls:
        with pytest.raises((MegakernelTTSError, ValueError, TypeError), match=expected):
            call(**{name: value})  # type: ignore[arg-type]


def test_a_transcript_of_a_wrong_type_is_named(checkpoint: Callable[..., Path]) -> None:
    with TTS.load(checkpoint("base", shallow=True), device=torch.device("cpu"), slots=1) as base:  # type: ignore[arg-type]
        with pytest.raises(TextError, match="found int"):
            base.clone("recording.wav", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 2, 1e300, 10**300], ids="{:.0e}".format)
def test_any_positive_repetition_penalty_gives_codes(tts: TTS, penalty: float) -> None:
    for temperature in (0.0, 1e-6, 0.9):
        sampling = Sampling(
            temperature, repetition_penalty=penalty, top_p=0.9, seed=1, max_frames=5, guard=False
        )
        assert len(tts.say(TEXT, sampling=sampling).codes) == 5


@pytest.mark.parametrize("text", ["", "   ", "\n\t\u3000"])
def test_an_empty_text_is_an_error(tts: TTS, text: str) -> None:
    with pytest.raises(TextError, match="nothing to say"):
        tts.say(text)
    with pytest.raises(TextError, match="nothing to say"):
        tts.stream(text)


def test_invalid_arguments_raise_at_the_call(tts: TTS) -> None:
    with pytest.raises(MegakernelTTSError):
        tts.stream("hello", "nobody")
    with pytest.raises(TextError, match="lone surrogate"):
        tts.say("a\ud800")
    with pytest.raises(TextError, match="found int"):
        tts.say(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout is 'both'"):
        tts.say("hello", layout="both")  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(
    text=st.text(max_size=60)
    | st.text(st.sampled_from("!?.,… \x00\n👩\u200d🏽<|im_end|>"), max_size=30)
)
@example(text="<A>")
@example(text=" <<h|ɛ>> ")
def test_any_text_is_spoken_or_refused(tts: TTS, text: str) -> None:
    few = Sampling(seed=0, max_frames=2)
    try:
        assert len(tts.say(text, sampling=few).codes) >= 1
    except TextError:
        assert not re.sub(TAG, "", text).strip()
    session = tts.open(sampling=few)
    session.push_text(text)
    session.end()
    assert isinstance(list(session)[-1], Finish)


def test_a_megabyte_without_a_space_can_be_started_and_stopped(tts: TTS) -> None:
    stream = tts.stream("a" * 1_000_000, sampling=Sampling(seed=0, max_frames=2))
    assert len(next(stream).codes) == 1
    stream.close()
    assert tts.say("hello", sampling=SHORT).finish == "length"


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ({"first": 1.5}, TypeError, r"ChunkPolicy\.first is 1\.5; it must be a whole number"),
        ({"ahead": "8"}, TypeError, r"ChunkPolicy\.ahead is '8'; it must be a whole number"),
        ({"first": 0}, ValueError, "1 <= first <= largest <= ahead"),
        ({"first": 9, "largest": 8}, ValueError, "1 <= first <= largest <= ahead"),
    ],
)
def test_invalid_chunk_policies_are_refused(
    policy: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ChunkPolicy(**policy)


def test_a_session_is_announced_while_its_text_is_tokenised(
    tts: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that begin meanwhile wait for it."""
    loop, encode = tts._loaded.engine._loop, tts._loaded.tokenizer.encode
    seen: list[int] = []

    def counted(text: str) -> list[int]:
        seen.append(loop.pending_opens.count)
        return encode(text)

    monkeypatch.setattr(tts._loaded.tokenizer, "encode", counted)
    tts.say("Hello.", sampling=Sampling(max_frames=1))
    with pytest.raises(MegakernelTTSError):
        tts.say("Hello.", "nobody")
    assert set(seen) == {1} and loop.pending_opens.count == 0
