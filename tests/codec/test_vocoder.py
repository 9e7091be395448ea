"""The engine with either vocoder: chunks are the decoded codes, in any batch."""

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel_tts import AudioChunk, Session
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.decoder import Decoder, DecodeRequest, PendingDecodeRequest
from megakernel_tts.codec.vocoder import ConfirmFrames, PendingSamples, TorchVocoder, Vocoder
from megakernel_tts.engine.scheduler import SchedulingPolicy
from megakernel_tts.kernels.codec import CodecKernels
from megakernel_tts.loader import LoadedModel
from megakernel_tts.model.config import CodecConfig
from megakernel_tts.text.prompt import PromptBuilder
from tests.codec.decoding import LOW_RATES, round_weights, signal_to_noise, small_codec
from tests.comparison import MakeComparison
from tests.emulator.codec import emulated_codec_kernels
from tests.fakes import ExpectingVocoder, ScriptedBackend, codes_of
from tests.rig import Rig, codes, drain, scripted

SLOTS = 2


class CodecParts(NamedTuple):
    codec: tuple[w.DecoderWeights, CodecConfig]
    kernels: CodecKernels


@pytest.fixture(scope="module")
def codec_parts(tmp_path_factory: pytest.TempPathFactory) -> CodecParts:
    """A codec of 64 samples per frame and its emulated kernels."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    codec = round_weights(small_codec(tmp_path_factory.mktemp("codec"), LOW_RATES, codes=256))
    return CodecParts(codec, emulated_codec_kernels())


@pytest.fixture(params=["torch", "torch-without-pending", "kernels"])
def codec_rig(
    request: pytest.FixtureRequest, load: Callable[..., LoadedModel], codec_parts: CodecParts
) -> Iterator[Rig]:
    """A scripted backend with a codec of 64 samples per frame."""
    decoder = Decoder(*codec_parts.codec)
    vocoder: Vocoder = TorchVocoder(decoder)
    if request.param == "kernels":
        vocoder = CudaDecoder(*codec_parts.codec, slots=SLOTS, kernels=codec_parts.kernels)
    if request.param != "torch":  # emulated kernels read the codes at the launch
        vocoder.max_pending_frames = 0
    rig = Rig(load(), ScriptedBackend(num_slots=SLOTS), decoder=decoder, vocoder=vocoder)
    yield rig
    rig.engine.close()


def pcm(chunks: list[AudioChunk]) -> NDArray[np.int16]:
    return np.concatenate([chunk.pcm for chunk in chunks])


def decode_whole(rig: Rig, chunks: list[AudioChunk]) -> NDArray[np.float32]:
    decoder = rig.engine.decoder
    frames = torch.from_numpy(codes(chunks))[None]
    return decoder.decode(frames, decoder.start())[0][0].numpy()


def test_streams_with_different_chunk_lengths_match_torch(codec_rig: Rig) -> None:
    """Three streams share two slots."""
    policies = [(1, 1), (3, 8), (1, 4)]
    sessions = [
        codec_rig.open(seed=seed, first=first, largest=largest, max_frames=9)
        for seed, (first, largest) in enumerate(policies)
    ]
    received: dict[int, list[AudioChunk]] = {}
    readers = [
        threading.Thread(target=lambda i=i, s=s: received.update({i: drain(s)[0]}))
        for i, s in enumerate(sessions)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    for i in range(3):
        assert len(codes(received[i])) == 9
        assert signal_to_noise(pcm(received[i]), decode_whole(codec_rig, received[i])) > 60


def test_a_swapped_out_stream_continues_where_it_stopped(codec_rig: Rig) -> None:
    late = codec_rig.open(None, seed=1, first=1, largest=1)
    late.push_text("hello to ")
    chunks = [next(iter(late)) for _ in range(2)]
    assert all(isinstance(chunk, AudioChunk) for chunk in chunks)
    for seed in (2, 3):
        drain(codec_rig.open("hello to you. And to you.", seed=seed, max_frames=6))
        codec_rig.backend.gate.clear()
        others = [codec_rig.open("hello.", seed=10 * seed + i, max_frames=4) for i in range(2)]
        codec_rig.hold()
        codec_rig.advance(SchedulingPolicy().stall_timeout_s)
        codec_rig.resume()  # now both slots are needed
        for other in others:
            drain(other)
    assert codec_rig.backend.num_swapped_out > 0
    late.push_text("the world.")
    late.end()
    rest, finish = drain(late)
    assert finish.reason == "eos"
    whole = [chunk for chunk in (*chunks, *rest) if isinstance(chunk, AudioChunk)]
    assert len(codes(whole)) == finish.frames
    assert signal_to_noise(pcm(whole), decode_whole(codec_rig, whole)) > 60


def _fail_unexpected(requests: object) -> Any:
    raise AssertionError("every chunk must be decoded before its codes are complete")


@pytest.fixture
def expecting(rig: Rig) -> ExpectingVocoder:
    assert isinstance(rig.engine.vocoder, ExpectingVocoder)
    return rig.engine.vocoder


def test_a_chunk_is_decoded_while_its_last_frame_is_generated(
    rig: Rig, expecting: ExpectingVocoder
) -> None:
    chunks, finish = drain(rig.open(first=1, largest=4, max_frames=10))
    assert finish.reason == "length"
    assert expecting.confirmed == [(n, n) for n in (1, 2, 4, 3)]
    assert [len(chunk.codes) for chunk in chunks] == [1, 2, 4, 3]


def test_a_long_chunk_does_not_delay_the_decoding_of_others(
    rig: Rig, expecting: ExpectingVocoder
) -> None:
    expecting.max_pending_frames = 4
    rig.backend.gate.clear()
    sessions = [rig.open(seed=n, first=n, largest=n, max_frames=10) for n in (5, 2)]
    rig.backend.gate.set()
    for n, session in zip((5, 2), sessions, strict=True):
        np.testing.assert_array_equal(codes(drain(session)[0]), scripted(n, 10))
    assert {frames for frames, _ in expecting.confirmed} == {2}


def test_speech_that_ends_before_the_pending_frames_is_cut(
    rig: Rig, expecting: ExpectingVocoder
) -> None:
    chunks, finish = drain(rig.open(first=5, largest=5))
    assert finish.reason == "eos" and finish.frames == rig.num_frames
    left = rig.num_frames % 5
    assert left, "choose another size: the speech ends with a chunk"
    assert expecting.confirmed[-1] == (5, left)
    np.testing.assert_array_equal(codes(chunks), scripted(1, rig.num_frames))


def test_a_failed_step_discards_pending_frames(rig: Rig, expecting: ExpectingVocoder) -> None:
    """The other stream's codes do not change."""
    rig.backend.failing_steps = {13: 3}  # the last frame of its second step
    rig.backend.gate.clear()
    sessions = [rig.open(seed=seed, first=2, largest=2, max_frames=6) for seed in (13, 2)]
    rig.backend.gate.set()
    (poisoned, failed), (chunks, finish) = (drain(session) for session in sessions)
    assert failed.reason == "error" and finish.reason == "length"
    assert any(frames and not count for frames, count in expecting.confirmed)
    np.testing.assert_array_equal(codes(poisoned), scripted(13, 3))
    np.testing.assert_array_equal(codes(chunks), scripted(2, 6))


@pytest.mark.parametrize("when", ["decode_pending", "confirm"])
def test_a_chunk_is_decoded_later_if_pending_decoding_fails(
    rig: Rig, expecting: ExpectingVocoder, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fail(_: object) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(
        expecting, "decode_pending", fail if when == "decode_pending" else lambda _: fail
    )
    chunks, finish = drain(rig.open(first=2, largest=4, max_frames=9))
    assert finish.reason == "length"
    np.testing.assert_array_equal(codes(chunks), scripted(1, 9))


def test_codec_kernels_read_the_codes_of_the_decode_kernel(
    comparison: MakeComparison,
    codec_parts: CodecParts,
    load: Callable[..., LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The codec reads the codes from the memory that the decode kernel writes."""
    pair = comparison("0b6", blocks=2, shallow=True)
    vocoder = CudaDecoder(*codec_parts.codec, slots=4, kernels=codec_parts.kernels)
    prompt_builder = PromptBuilder(pair.half.model.embeddings, pair.config, load().tokenizer)
    decoder = Decoder(*codec_parts.codec)
    rig = Rig(
        load(),
        cast(Any, pair.kernel),
        decoder=decoder,
        vocoder=vocoder,
        prompt_builder=prompt_builder,
    )
    decode_pending, num_pending = vocoder.decode_pending, list[int]()

    def record(requests: Sequence[PendingDecodeRequest]) -> ConfirmFrames:
        num_pending.extend(len(request.pending) for request in requests)
        return decode_pending(requests)

    monkeypatch.setattr(vocoder, "decode_pending", record)
    monkeypatch.setattr(vocoder, "decode", _fail_unexpected)
    chunks, finish = drain(rig.open("hi", first=1, largest=2, max_frames=4))
    rig.engine.close()
    assert finish.frames == 4 and num_pending == [1, 2, 1]
    solo = CudaDecoder(*codec_parts.codec, slots=1, kernels=codec_parts.kernels)
    solo.load_slot(0)
    (samples,) = solo.decode([DecodeRequest(0, torch.from_numpy(codes(chunks)))])()
    np.testing.assert_array_equal(pcm(chunks), samples)


def test_non_finite_samples_end_only_their_stream(
    codec_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, marked = codec_rig.engine.vocoder.decode, codes_of(1, 2)

    def decode_with_loss(requests: list[DecodeRequest]) -> PendingSamples:
        pending = decode(requests)
        return lambda: [
            None if (request.codes == marked).all(-1).any() else samples
            for request, samples in zip(requests, pending(), strict=True)
        ]

    monkeypatch.setattr(codec_rig.engine.vocoder, "decode", decode_with_loss)
    sessions = [codec_rig.open(seed=seed, max_frames=4, first=1, largest=1) for seed in (1, 2)]
    (lost, ended), (chunks, finish) = (drain(session) for session in sessions)
    assert (len(codes(lost)), ended.reason, ended.frames) == (2, "error", 2)
    assert "not finite" in str(ended.error)
    assert (len(codes(chunks)), finish.reason) == (4, "length")


def test_a_slot_is_reused_after_its_chunk_is_decoded(
    codec_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remaining rounds of a cancelled stream do not reach the next stream in its slot."""

    def short() -> Session:
        return codec_rig.open("hello to you.", seed=3, first=1, largest=1, max_frames=6)

    solo, _ = drain(short())
    codec_rig.backend.gate.clear()
    beside, gone = (codec_rig.open(seed=seed, first=20, largest=20) for seed in (1, 2))
    following = short()
    decode = codec_rig.engine.vocoder.decode

    def decode_and_cancel(requests: list[DecodeRequest]) -> PendingSamples:
        pending = decode(requests)
        gone.cancel()
        return pending

    monkeypatch.setattr(codec_rig.engine.vocoder, "decode", decode_and_cancel)
    codec_rig.backend.gate.set()
    chunks, finish = drain(following)
    beside.cancel()
    assert finish.frames == 6
    assert np.abs(pcm(chunks).astype(int) - pcm(solo)).max() <= 1
