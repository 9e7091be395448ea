"""The loop over either vocoder: what is heard is the codes, whoever speaks beside."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel_tts import AudioChunk, Session
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.decoder import Decoder, DecodeRequest
from megakernel_tts.codec.vocoder import PendingSamples, TorchVocoder, Vocoder
from megakernel_tts.loader import Loaded
from megakernel_tts.model.checkpoint import map_leaves
from megakernel_tts.model.config import CodecConfig
from megakernel_tts.model.random_checkpoint import random_tensor
from megakernel_tts.text.prompt import Prompter
from tests.codec.test_cuda_decoder import low_rate_config, signal_to_noise
from tests.comparison import MakeComparison
from tests.emulator.codec import EmulatedCodec
from tests.fakes import ExpectingVocoder, ScriptedBackend, codes_of
from tests.rig import Rig, codes, drain, scripted

SLOTS = 2


class CodecParts(NamedTuple):
    codec: tuple[w.Decoder, CodecConfig]
    ops: EmulatedCodec


@pytest.fixture(scope="module")
def codec_parts(tmp_path_factory: pytest.TempPathFactory) -> CodecParts:
    """A codec of few samples, and its kernels."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    config = low_rate_config(tmp_path_factory.mktemp("codec"), codes=256)
    weights = map_leaves(w.decoder_specs(config.decoder), random_tensor)
    return CodecParts((weights, config), EmulatedCodec())


@pytest.fixture(params=["torch", "late", "kernels"])
def codec_rig(
    request: pytest.FixtureRequest, load: Callable[..., Loaded], codec_parts: CodecParts
) -> Iterator[Rig]:
    """A scripted backend before a codec of few samples."""
    decoder = Decoder(*codec_parts.codec)
    vocoder: Vocoder = TorchVocoder(decoder)
    if request.param == "kernels":
        vocoder = CudaDecoder(*codec_parts.codec, slots=SLOTS, ops=codec_parts.ops)
    if request.param != "torch":  # emulated, kernels read codes at once
        vocoder.max_pending_frames = 0
    rig = Rig(load(), ScriptedBackend(num_slots=SLOTS), decoder=decoder, vocoder=vocoder)
    yield rig
    rig.engine.close()


def pcm(chunks: list[AudioChunk]) -> NDArray[np.int16]:
    return np.concatenate([chunk.pcm for chunk in chunks])


def expected(rig: Rig, chunks: list[AudioChunk]) -> NDArray[np.float32]:
    decoder = rig.engine.decoder
    frames = torch.from_numpy(codes(chunks))[None]
    return decoder.decode(frames, decoder.start())[0][0].numpy()


def test_streams_of_any_chunks_together(codec_rig: Rig) -> None:
    """More than there are slots, so that a slot serves one after another."""
    policies = [(1, 1), (3, 8), (1, 4)]
    sessions = [
        codec_rig.open(seed=seed, first=first, largest=largest, max_frames=9)
        for seed, (first, largest) in enumerate(policies)
    ]
    heard: dict[int, list[AudioChunk]] = {}
    readers = [
        threading.Thread(target=lambda i=i, s=s: heard.update({i: drain(s)[0]}))
        for i, s in enumerate(sessions)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    for i in range(3):
        assert len(codes(heard[i])) == 9
        assert signal_to_noise(pcm(heard[i]), expected(codec_rig, heard[i])) > 60


def test_a_stream_that_was_suspended_goes_on_where_it_stopped(
    codec_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megakernel_tts.engine.loop._PATIENCE", 0.02)
    late = codec_rig.open(None, seed=1, first=1, largest=1)
    late.push_text("hello to ")
    chunks = [next(iter(late)) for _ in range(2)]
    assert all(isinstance(chunk, AudioChunk) for chunk in chunks)
    for seed in (2, 3):  # take both slots, one after the other
        drain(codec_rig.open("hello to you. And to you.", seed=seed, max_frames=6))
        time.sleep(0.05)
        others = [codec_rig.open("hello.", seed=10 * seed + i, max_frames=4) for i in range(2)]
        for other in others:
            drain(other)
    assert codec_rig.backend.suspended > 0
    late.push_text("the world.")
    late.end()
    rest, finish = drain(late)
    assert finish.reason == "eos"
    whole = [chunk for chunk in (*chunks, *rest) if isinstance(chunk, AudioChunk)]
    assert len(codes(whole)) == finish.frames
    assert signal_to_noise(pcm(whole), expected(codec_rig, whole)) > 60


def _never(parts: object) -> Any:
    raise AssertionError("all of it is expected")


@pytest.fixture
def expecting(rig: Rig) -> ExpectingVocoder:
    assert isinstance(rig.engine.vocoder, ExpectingVocoder)
    return rig.engine.vocoder


def test_chunks_are_expected_while_their_last_frames_are_made(
    rig: Rig, expecting: ExpectingVocoder
) -> None:
    chunks, finish = drain(rig.open(first=1, largest=4, max_frames=10))
    assert finish.reason == "length"
    assert expecting.settled == [(n, n) for n in (1, 2, 4, 3)]
    assert [len(chunk.codes) for chunk in chunks] == [1, 2, 4, 3]


def test_a_chunk_that_is_too_long_keeps_no_other_from_being_expected(
    rig: Rig, expecting: ExpectingVocoder
) -> None:
    expecting.max_pending_frames = 4
    rig.backend.gate.clear()
    sessions = [rig.open(seed=n, first=n, largest=n, max_frames=10) for n in (5, 2)]
    rig.backend.gate.set()
    for n, session in zip((5, 2), sessions, strict=True):
        np.testing.assert_array_equal(codes(drain(session)[0]), scripted(n, 10))
    assert {frames for frames, _ in expecting.settled} == {2}


def test_speech_that_ends_before_the_expected_frame(rig: Rig, expecting: ExpectingVocoder) -> None:
    chunks, finish = drain(rig.open(first=5, largest=5))
    assert finish.reason == "eos" and finish.frames == rig.frames
    left = rig.frames % 5
    assert left, "choose another size: it ends with a chunk"
    assert expecting.settled[-1] == (5, left)
    np.testing.assert_array_equal(codes(chunks), scripted(1, rig.frames))


def test_a_failed_step_leaves_nothing_expected(rig: Rig, expecting: ExpectingVocoder) -> None:
    """Its neighbour says the same as alone."""
    rig.backend.poisoned = {13: 3}  # the last frame of its second step
    rig.backend.gate.clear()
    sessions = [rig.open(seed=seed, first=2, largest=2, max_frames=6) for seed in (13, 2)]
    rig.backend.gate.set()
    (poisoned, failed), (chunks, finish) = (drain(session) for session in sessions)
    assert failed.reason == "error" and finish.reason == "length"
    assert any(frames and not count for frames, count in expecting.settled)
    np.testing.assert_array_equal(codes(poisoned), scripted(13, 3))
    np.testing.assert_array_equal(codes(chunks), scripted(2, 6))


@pytest.mark.parametrize("when", ["expected", "settled"])
def test_what_cannot_be_expected_is_decoded_afterwards(
    rig: Rig, expecting: ExpectingVocoder, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fail(_: object) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(expecting, "decode_pending", fail if when == "expected" else lambda _: fail)
    chunks, finish = drain(rig.open(first=2, largest=4, max_frames=9))
    assert finish.reason == "length"
    np.testing.assert_array_equal(codes(chunks), scripted(1, 9))


def test_both_kernels_together(
    comparison: MakeComparison, codec_parts: CodecParts, load: Callable[..., Loaded]
) -> None:
    """The codec reads the codes where the other writes them."""
    made, b = codec_parts, comparison("0b6", blocks=2)
    vocoder = CudaDecoder(*made.codec, slots=4, ops=made.ops)
    prompter = Prompter(b.half.model.embeddings, b.config, load().tokenizer)
    decoder = Decoder(*made.codec)
    rig = Rig(load(), cast(Any, b.kernel), decoder=decoder, vocoder=vocoder, prompter=prompter)
    expect, seen = vocoder.decode_pending, list[int]()
    vocoder.decode_pending = lambda parts: (
        seen.extend(len(p.pending) for p in parts) or expect(parts)
    )
    vocoder.decode = _never
    chunks, finish = drain(rig.open("hi", first=2, largest=4, max_frames=7))
    rig.engine.close()
    assert finish.frames == 7 and seen == [2, 4, 1]
    alone = CudaDecoder(*made.codec, slots=1, ops=made.ops)
    alone.load_slot(0)
    (samples,) = alone.decode([DecodeRequest(0, torch.from_numpy(codes(chunks)))])()
    np.testing.assert_array_equal(pcm(chunks), samples)


def test_samples_that_are_not_finite_end_their_stream_alone(
    codec_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, marked = codec_rig.engine.vocoder.decode, codes_of(1, 2)

    def lose_one(parts: list[DecodeRequest]) -> PendingSamples:
        decoding = decode(parts)
        return lambda: [
            None if (part == marked).all(-1).any() else samples
            for (_, part), samples in zip(parts, decoding(), strict=True)
        ]

    monkeypatch.setattr(codec_rig.engine.vocoder, "decode", lose_one)
    sessions = [codec_rig.open(seed=seed, max_frames=4, first=1, largest=1) for seed in (1, 2)]
    (lost, ended), (chunks, finish) = (drain(session) for session in sessions)
    assert (len(codes(lost)), ended.reason, ended.frames) == (2, "error", 2)
    assert "not finite" in str(ended.error)
    assert (len(codes(chunks)), finish.reason) == (4, "length")


def test_a_slot_is_taken_after_the_chunk_that_was_being_decoded(
    codec_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is cancelled may have rounds to go, of which the next in its slot hears nothing."""

    def short() -> Session:
        return codec_rig.open("hello to you.", seed=3, first=1, largest=1, max_frames=6)

    alone, _ = drain(short())
    codec_rig.backend.gate.clear()
    beside, gone = (codec_rig.open(seed=seed, first=20, largest=20) for seed in (1, 2))
    following = short()
    decode = codec_rig.engine.vocoder.decode

    def cancel(parts: list[DecodeRequest]) -> PendingSamples:
        decoding = decode(parts)
        gone.cancel()
        return decoding

    monkeypatch.setattr(codec_rig.engine.vocoder, "decode", cancel)
    codec_rig.backend.gate.set()
    chunks, finish = drain(following)
    beside.cancel()
    assert finish.frames == 6
    assert np.abs(pcm(chunks).astype(int) - pcm(alone)).max() <= 1
