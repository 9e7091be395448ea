"""The codec's kernels: on emulated instructions everywhere, themselves on a GPU."""

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.codec import weights as w
from megakernel_tts.codec.cuda_decoder import CudaDecoder, rounds
from megakernel_tts.codec.decoder import Decoder, DecodeRequest, PendingDecodeRequest
from megakernel_tts.model.checkpoint import Checkpoint, map_leaves
from megakernel_tts.model.config import CodecConfig, read_codec_config
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.model.random_checkpoint import codec_config, random_tensor
from megakernel_tts.model.random_released import random_codec
from tests.emulator.codec import EmulatedCodec

CODES = 64
Codec = tuple[w.Decoder, CodecConfig]
Make = Callable[..., CudaDecoder]


def low_rate_config(folder: Path, codes: int = CODES) -> CodecConfig:
    """A small codec of 64 samples a frame, which is soon decoded; its histories outlast a frame."""
    content = codec_config(codes)
    content |= {"decode_upsample_rate": 64, "encode_downsample_rate": 64}
    content["decoder_config"]["upsample_rates"] = [2, 2, 2, 2]
    content["encoder_config"]["upsampling_ratios"] = [2, 2, 2, 4]
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    return read_codec_config(file)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    config = low_rate_config(tmp_path_factory.mktemp("codec"))
    return map_leaves(w.decoder_specs(config.decoder), random_tensor), config


@pytest.fixture(scope="module")
def make() -> Make:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return lambda codec, processors=4: CudaDecoder(*codec, slots=3, ops=EmulatedCodec(processors))


@pytest.fixture(scope="module")
def decoder(codec: Codec, make: Make) -> CudaDecoder:
    return make(codec)


def some_codes(frames: int, seed: int, codes: int = CODES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, codes, (frames, 16), generator=generator)


def plain(codec: Codec, codes: Tensor) -> NDArray[np.float32]:
    """What the decoder in plain torch makes of it, on the weights' device."""
    reference = Decoder(*codec)
    device = codec[0].input.device
    return reference.decode(codes[None].to(device), reference.start())[0][0].cpu().numpy()


def stream(
    decoder: CudaDecoder, slot: int, codes: Tensor, sizes: Sequence[int]
) -> NDArray[np.int16]:
    decoder.load_slot(slot)
    return np.concatenate([the_samples(decoder, slot, part) for part in codes.split(list(sizes))])


def the_samples(decoder: CudaDecoder, slot: int, codes: Tensor) -> NDArray[np.int16]:
    (samples,) = decoder.decode([DecodeRequest(slot, codes)])()
    assert samples is not None
    return samples


def signal_to_noise(samples: NDArray[np.int16], reference: NDArray[np.float32]) -> float:
    """In dB, without the constant part, which hides noise."""
    error = samples / 32767.0 - reference
    return 20 * math.log10(float(reference.std()) / float(error.std()))


def test_samples_are_those_of_plain_torch(codec: Codec, decoder: CudaDecoder) -> None:
    """For longer than the window and the ring of keys."""
    codes = some_codes(100, 0)
    samples = stream(decoder, 0, codes, [100])
    assert signal_to_noise(samples, plain(codec, codes)) >= 60


def test_the_demo_voice(make: Make) -> None:
    """At its own rates, on codes that it speaks."""
    folder = find_checkpoint("demo") / "speech_tokenizer"
    config = read_codec_config(folder / "config.json")
    weights = Checkpoint(folder).load(
        w.decoder_specs(config.decoder), torch.device("cpu"), torch.float32
    )
    golden = np.load(Path(__file__).parent.parent / "goldens/official-demo.npz")
    codes = torch.from_numpy(golden["demo-full/codes"])[6:9].long()
    samples = stream(make((weights, config)), 0, codes, [1, 2])
    assert signal_to_noise(samples, plain((weights, config), codes)) >= 60


def test_streams_of_a_call_and_their_chunks_change_no_bit(decoder: CudaDecoder) -> None:
    codes = [some_codes(30, seed) for seed in range(3)]
    alone = [stream(decoder, 0, c, [30]) for c in codes]
    for slot in range(3):
        decoder.load_slot(slot)
    made: list[list[NDArray[np.int16]]] = [[], [], []]
    rng, at = random.Random(0), [0, 0, 0]
    while min(at) < 30:
        speaking = [s for s in rng.sample(range(3), rng.randint(1, 3)) if at[s] < 30]
        ends = {s: min(30, at[s] + rng.choice([1, 1, 2, 5, 11])) for s in speaking}
        parts = [DecodeRequest(s, codes[s][at[s] : ends[s]]) for s in speaking]
        for s, samples in zip(speaking, decoder.decode(parts)(), strict=True):
            assert samples is not None
            made[s].append(samples)
            at[s] = ends[s]
    for s in range(3):
        np.testing.assert_array_equal(np.concatenate(made[s]), alone[s])


def expected(
    slot: int, codes: Tensor, known: int, frames: int, rng: random.Random
) -> tuple[PendingDecodeRequest, NDArray[np.int32]]:
    """So many frames, the first ones known; where the others come from, there is anything at first.

    Returns:
        What is expected, and where its codes come: more than a frame's lie in a row.
    """
    junk = [rng.choice([-7, 0, CODES, 2150, 2**31 - 1]) for _ in range((frames - known) * 17)]
    rows = np.array(junk, np.int32).reshape(frames - known, 17)[:, 1:]
    return PendingDecodeRequest(slot, codes[:known].numpy(), rows), rows


def test_frames_that_were_expected_and_not_made_leave_no_trace(decoder: CudaDecoder) -> None:
    codes = [some_codes(60, seed) for seed in range(3)]
    alone = [stream(decoder, 0, c, [60]) for c in codes]
    for slot in range(3):
        decoder.load_slot(slot)
    made: list[list[NDArray[np.int16]]] = [[], [], []]
    rng, at, fewer = random.Random(0), [0, 0, 0], 0
    while min(at) < 60:
        speaking = [s for s in rng.sample(range(3), rng.randint(1, 3)) if at[s] < 60]
        parts: list[PendingDecodeRequest] = []
        counts: list[int] = []
        for s in speaking:
            left, frames = codes[s][at[s] :], rng.randint(1, 8)
            known, count = (rng.randint(0, min(frames, len(left))) for _ in range(2))
            part, rows = expected(s, left, known, frames, rng)
            rows[: max(count - known, 0)] = left[known : max(count, known)]
            parts.append(part)
            counts.append(count)
            fewer += 0 < count < frames
        settle = decoder.decode_pending(parts)
        heard = [(s, count) for s, count in zip(speaking, counts, strict=True) if count]
        for (s, count), samples in zip(heard, settle(counts)(), strict=True):
            assert samples is not None
            made[s].append(samples)
            at[s] += count
    assert fewer > 5
    for s in range(3):
        np.testing.assert_array_equal(np.concatenate(made[s]), alone[s])


def test_the_size_of_the_gpu_changes_no_bit(codec: Codec, decoder: CudaDecoder, make: Make) -> None:
    """It chooses the tiles."""
    codes = some_codes(8, 1)
    large = make(codec, processors=1000)
    np.testing.assert_array_equal(stream(large, 0, codes, [8]), stream(decoder, 0, codes, [8]))


def test_a_stream_goes_on_from_a_state_in_any_slot(decoder: CudaDecoder) -> None:
    codes = some_codes(12, 2)
    whole = stream(decoder, 0, codes, [12])
    stream(decoder, 1, codes[:5], [5])
    state = decoder.save_slot(1)
    stream(decoder, 1, some_codes(7, 3), [7])  # what the slot does now does not reach the state
    for slot in (1, 2):
        decoder.load_slot(slot, state)
        rest = the_samples(decoder, slot, codes[5:])
        np.testing.assert_array_equal(rest, whole[5 * decoder.frame :])


def test_a_stream_goes_on_where_plain_torch_stopped(codec: Codec, decoder: CudaDecoder) -> None:
    codes, reference = some_codes(94, 7), Decoder(*codec)
    _, state = reference.decode(codes[None, :90], reference.start())
    decoder.load_slot(2, decoder.prepare_state(state))
    samples = the_samples(decoder, 2, codes[90:])
    expected, _ = reference.decode(codes[None, 90:], state)
    assert signal_to_noise(samples, expected[0].numpy()) >= 60


def test_a_launch_that_fails_leaves_every_slot_as_it_was(
    decoder: CudaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = some_codes(3, 8)
    alone = stream(decoder, 0, codes, [3])
    decoder.load_slot(0)
    first = the_samples(decoder, 0, codes[:1])
    with monkeypatch.context() as broken, pytest.raises(ArithmeticError):
        broken.setattr(decoder, "_launch", lambda count: 1 / 0)
        decoder.decode([DecodeRequest(0, codes[1:])])
    rest = the_samples(decoder, 0, codes[1:])
    np.testing.assert_array_equal(np.concatenate([first, rest]), alone)


def test_what_is_not_finite_does_not_leave_and_stays_in_its_stream(decoder: CudaDecoder) -> None:
    codes = some_codes(4, 4)
    alone = stream(decoder, 0, codes, [4])
    decoder.load_slot(0)
    decoder.load_slot(1)
    state = decoder.save_slot(1)
    nothing = torch.full(state.history.shape, torch.nan, dtype=state.history.dtype)
    decoder.load_slot(1, replace(state, history=nothing.to(state.history.device)))  # whole at once
    fine, broken = decoder.decode([DecodeRequest(0, codes), DecodeRequest(1, codes)])()
    assert broken is None
    assert fine is not None
    np.testing.assert_array_equal(fine, alone)


def test_activations_beyond_half_precision_stay_finite(codec: Codec, make: Make) -> None:
    weights, config = codec
    loud = replace(weights.conv_in, weight=weights.conv_in.weight * 1e7)
    decoder = make((replace(weights, conv_in=loud), config))
    decoder.load_slot(0)
    (samples,) = decoder.decode([DecodeRequest(0, some_codes(2, 5))])()
    assert samples is not None, "infinity has left"


def test_weights_of_any_size_keep_their_precision(codec: Codec, make: Make) -> None:
    """Half precision has few bits below 6e-5: each column has a unit of its own."""
    weights, config = codec
    first = weights.upsample[0]
    down = first.convnext.down * torch.logspace(-8, 0, len(first.convnext.down))[:, None]
    convnext = replace(first.convnext, down=down, gamma=first.convnext.gamma * 100)
    small = replace(weights, upsample=(replace(first, convnext=convnext), *weights.upsample[1:]))
    codes = some_codes(4, 6)
    samples = stream(make((small, config)), 0, codes, [4])
    assert signal_to_noise(samples, plain((small, config), codes)) >= 60


def test_what_cannot_be_decoded_is_refused(codec: Codec, decoder: CudaDecoder, make: Make) -> None:
    with pytest.raises(ValueError, match="between 0 and 63, found 0 to 64 in slot 1"):
        decoder.decode([DecodeRequest(1, torch.tensor([[0] * 15 + [64]]))])
    with pytest.raises(ValueError, match=r"each slot once, found \[1, 1\]"):
        decoder.decode([DecodeRequest(1, some_codes(1, 0)), DecodeRequest(1, some_codes(1, 0))])
    weights, config = codec
    other = replace(config, decoder=replace(config.decoder, sliding_window=71))
    with pytest.raises(ValueError, match=r"sliding_window in \(72,\), found 71"):
        make((weights, other))


def test_rounds_share_the_room_in_order() -> None:
    def part(slot: int, frames: int) -> tuple[int, NDArray[np.int64]]:
        return slot, np.arange(frames, dtype=np.int64)[:, None]

    made = list(rounds([part(0, 3), part(1, 20), part(2, 0), part(3, 9)], 16))
    assert [[(slot, len(codes)) for slot, codes in parts] for parts in made] == [
        [(0, 3), (1, 8)],
        [(1, 8), (3, 8)],
        [(1, 4), (3, 1)],
    ]
    assert np.concatenate([c for parts in made for s, c in parts if s == 1])[:, 0].tolist() == list(
        range(20)
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Codec, CudaDecoder]:
    """The released size with random weights, on the GPU."""
    codec = random_codec(tmp_path_factory.mktemp("codec") / "config.json", seed=0)
    return codec, CudaDecoder(*codec, slots=8)


@pytest.mark.gpu
def test_the_released_size(large: tuple[Codec, CudaDecoder]) -> None:
    codec, decoder = large
    codes = some_codes(100, 0, 2048)
    samples = stream(decoder, 0, codes, [100])
    assert signal_to_noise(samples, plain(codec, codes)) >= 60
    np.testing.assert_array_equal(stream(decoder, 1, codes, [1] * 100), samples)


@pytest.mark.gpu
def test_eight_streams_of_the_released_size(large: tuple[Codec, CudaDecoder]) -> None:
    _, decoder = large
    codes = [some_codes(32, seed, 2048) for seed in range(8)]
    alone = [stream(decoder, 0, c, [32]) for c in codes]
    for slot in range(8):
        decoder.load_slot(slot)
    made: list[list[NDArray[np.int16]]] = [[] for _ in codes]
    rng, at = random.Random(0), [0] * 8
    while min(at) < 32:
        speaking = [s for s in rng.sample(range(8), rng.randint(1, 8)) if at[s] < 32]
        ends = {s: min(32, at[s] + rng.randint(1, 10)) for s in speaking}
        parts = [DecodeRequest(s, codes[s][at[s] : ends[s]]) for s in speaking]
        for s, samples in zip(speaking, decoder.decode(parts)(), strict=True):
            assert samples is not None
            made[s].append(samples)
            at[s] = ends[s]
    for s in range(8):
        np.testing.assert_array_equal(np.concatenate(made[s]), alone[s])


@pytest.mark.gpu
def test_frames_are_expected_behind_what_makes_them(large: tuple[Codec, CudaDecoder]) -> None:
    """Codes that are written 20 ms later, by work that the GPU was given before."""
    _, decoder = large
    codes, rng = some_codes(40, 3, 2048), random.Random(0)
    alone = stream(decoder, 0, codes, [40])
    decoder.load_slot(0)
    mail = torch.zeros(8, 16, dtype=torch.int32, pin_memory=True)
    made: list[NDArray[np.int16]] = []
    for at in range(0, 40, 5):
        count = rng.choice([5, 5, 3])
        later = codes[at : at + 5].int().cuda()
        mail.fill_(2150)
        torch.cuda._sleep(40_000_000)
        mail[:5].copy_(later, non_blocking=True)
        settle = decoder.decode_pending([PendingDecodeRequest(0, codes[:0].numpy(), mail.numpy())])
        torch.cuda.current_stream().synchronize()
        (first,) = settle([count])()
        made += [first, the_samples(decoder, 0, codes[at + count : at + 5])]
    np.testing.assert_array_equal(np.concatenate(made), alone)


@pytest.mark.gpu
def test_plain_torch_on_the_gpu_is_the_float32_mode(large: tuple[Codec, CudaDecoder]) -> None:
    (weights, config), _ = large
    codes = some_codes(4, 1, 2048)
    on_cpu = map_leaves(weights, lambda t: t.cpu())
    expected = plain((on_cpu, config), codes)
    made = plain((weights, config), codes)
    assert np.abs(made - expected).max() <= 1e-5 * np.abs(expected).max()
