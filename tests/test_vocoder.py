"""The loop over either vocoder: what is heard is the codes, whoever speaks beside."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel_tts import AudioChunk, Session
from megakernel_tts.checkpoint import map_leaves
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.cuda import CudaDecoder
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.loader import Loaded
from megakernel_tts.random_checkpoint import random_tensor
from megakernel_tts.vocoder import Decoding, TorchVocoder
from tests.codec.test_cuda import low_rate_config, signal_to_noise
from tests.emulator.codec import EmulatedCodec
from tests.fakes import ScriptedBackend, codes_of
from tests.rig import Rig, codes, drain

SLOTS = 2


@pytest.fixture(params=["torch", "kernels"])
def codec_rig(
    request: pytest.FixtureRequest,
    load: Callable[..., Loaded],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    """A scripted backend before a codec of few samples."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    folder = tmp_path_factory.getbasetemp() / "codec"
    folder.mkdir(exist_ok=True)
    config = low_rate_config(folder, codes=256)
    weights = map_leaves(w.decoder_specs(config.decoder), random_tensor)
    decoder = Decoder(weights, config)
    vocoder = (
        TorchVocoder(decoder)
        if request.param == "torch"
        else CudaDecoder(weights, config, slots=SLOTS, ops=EmulatedCodec(folder))
    )
    rig = Rig(load(), ScriptedBackend(slots=SLOTS), decoder=decoder, vocoder=vocoder)
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
    monkeypatch.setattr("megakernel_tts.loop._PATIENCE", 0.02)
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


def test_samples_that_are_not_finite_end_their_stream_alone(
    codec_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, marked = codec_rig.engine.vocoder.decode, codes_of(1, 2)

    def lose_one(parts: list[tuple[int, torch.Tensor]]) -> Decoding:
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

    def cancel(parts: list[tuple[int, torch.Tensor]]) -> Decoding:
        decoding = decode(parts)
        gone.cancel()
        return decoding

    monkeypatch.setattr(codec_rig.engine.vocoder, "decode", cancel)
    codec_rig.backend.gate.set()
    chunks, finish = drain(following)
    beside.cancel()
    assert finish.frames == 6
    assert np.abs(pcm(chunks).astype(int) - pcm(alone)).max() <= 1
