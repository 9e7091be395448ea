"""CudaDecoder of the released size against plain torch and itself, with the kernels on a GPU."""

import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel_common.checkpoint import map_leaves
from megakernel_common.kernels import build, nvrtc
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.decoder import DecodeRequest, PendingDecodeRequest
from megakernel_tts.kernels.codec import load_codec_kernels
from megakernel_tts.kernels.codec_unit_tiles import RESIDUAL_UNIT_TILES
from megakernel_tts.kernels.codec_warpgroup_tiles import WARPGROUP_TILES
from megakernel_tts.model.random_released import random_codec_weights
from tests.codec.decoding import (
    Codec,
    RandomTiles,
    RandomUnitTiles,
    RandomWarpgroupTiles,
    can_read_tiled_rows,
    decode_chunks,
    decode_one,
    decode_with_torch,
    joined,
    signal_to_noise,
    some_codes,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Codec, CudaDecoder]:
    """A codec of the released size with random weights, on the GPU."""
    codec = random_codec_weights(tmp_path_factory.mktemp("codec") / "config.json", seed=0)
    return codec, CudaDecoder(*codec, slots=8)


def test_released_size_matches_plain_torch(large: tuple[Codec, CudaDecoder]) -> None:
    codec, decoder = large
    codes = some_codes(100, 0, 2048)
    samples = decode_chunks(decoder, 0, codes, [100])
    assert signal_to_noise(samples, decode_with_torch(codec, codes)) >= 60
    np.testing.assert_array_equal(decode_chunks(decoder, 1, codes, [1] * 100), samples)


def test_both_launch_paths_give_the_same_samples(large: tuple[Codec, CudaDecoder]) -> None:
    codec, decoder = large
    for reason in (build.obstacle(), nvrtc.obstacle()):
        if reason:
            pytest.skip(reason)
    codes = some_codes(12, 4, 2048)
    expected = decode_chunks(decoder, 0, codes, [1, 8, 3])
    for path in ("extension", "nvrtc"):
        kernels = load_codec_kernels(torch.device("cuda", 0), path)
        other = CudaDecoder(*codec, slots=1, kernels=kernels)
        np.testing.assert_array_equal(decode_chunks(other, 0, codes, [1, 8, 3]), expected)


@pytest.mark.parametrize("tiled", [False, True])
def test_no_tile_changes_samples_of_the_released_size(
    large: tuple[Codec, CudaDecoder], tiled: bool
) -> None:
    """Of convolutions and linear layers whose input is tiled where it can be, or not."""
    codec, decoder = large
    codes = [some_codes(16, seed, 2048) for seed in range(8)]
    solo = [decode_chunks(decoder, 0, c, [16]) for c in codes]
    tiles = RandomWarpgroupTiles(0) if tiled else RandomTiles(0)
    unit_tiles = RandomUnitTiles(0)
    kernels = load_codec_kernels(
        torch.device("cuda", 0),
        choose=tiles,
        choose_unit=unit_tiles,
        choose_tiling=can_read_tiled_rows if tiled else lambda *_: False,
    )
    other = CudaDecoder(*codec, slots=8, kernels=kernels)
    for slot in range(8):
        other.load_slot(slot)
    made: list[list[NDArray[np.int16]]] = [[] for _ in codes]
    for chunk in (slice(0, 7), slice(7, 15), slice(15, 16)):
        requests = [DecodeRequest(slot, codes[slot][chunk]) for slot in range(8)]
        for slot, samples in enumerate(other.decode(requests)()):
            assert samples is not None
            made[slot].append(samples)
    for slot in range(8):
        np.testing.assert_array_equal(joined(made[slot]), solo[slot])
    if kernels.has_warpgroups:
        assert tiles.used >= {tile for tile in WARPGROUP_TILES if tile.is_tiled == tiled}
        assert unit_tiles.used >= {*RESIDUAL_UNIT_TILES, None}


def test_batching_does_not_change_samples_of_the_released_size(
    large: tuple[Codec, CudaDecoder],
) -> None:
    _, decoder = large
    codes = [some_codes(32, seed, 2048) for seed in range(8)]
    solo = [decode_chunks(decoder, 0, c, [32]) for c in codes]
    for slot in range(8):
        decoder.load_slot(slot)
    made: list[list[NDArray[np.int16]]] = [[] for _ in codes]
    rng, at = random.Random(0), [0] * 8
    while min(at) < 32:
        slots = [s for s in rng.sample(range(8), rng.randint(1, 8)) if at[s] < 32]
        ends = {s: min(32, at[s] + rng.randint(1, 10)) for s in slots}
        requests = [DecodeRequest(s, codes[s][at[s] : ends[s]]) for s in slots]
        for s, samples in zip(slots, decoder.decode(requests)(), strict=True):
            assert samples is not None
            made[s].append(samples)
            at[s] = ends[s]
    for s in range(8):
        np.testing.assert_array_equal(np.concatenate(made[s]), solo[s])


def test_pending_codes_are_read_in_stream_order(large: tuple[Codec, CudaDecoder]) -> None:
    """The codes are written 20 ms after the call, by work launched before it."""
    _, decoder = large
    codes, rng = some_codes(40, 3, 2048), random.Random(0)
    solo = decode_chunks(decoder, 0, codes, [40])
    decoder.load_slot(0)
    pending = torch.zeros(8, 16, dtype=torch.int32, pin_memory=True)
    made: list[NDArray[np.int16]] = []
    for at in range(0, 40, 5):
        count = rng.choice([5, 5, 3])
        written = codes[at : at + 5].int().cuda()
        pending.fill_(2150)
        torch.cuda._sleep(40_000_000)
        pending[:5].copy_(written, non_blocking=True)
        confirm = decoder.decode_pending(
            [PendingDecodeRequest(0, codes[:0].numpy(), pending.numpy())]
        )
        torch.cuda.current_stream().synchronize()
        (first,) = confirm([count])()
        made += [first, decode_one(decoder, 0, codes[at + count : at + 5])]
    np.testing.assert_array_equal(np.concatenate(made), solo)


def test_plain_torch_on_the_gpu_computes_in_float32(large: tuple[Codec, CudaDecoder]) -> None:
    (weights, config), _ = large
    codes = some_codes(4, 1, 2048)
    on_cpu = map_leaves(weights, lambda t: t.cpu())
    expected = decode_with_torch((on_cpu, config), codes)
    made = decode_with_torch((weights, config), codes)
    assert np.abs(made - expected).max() <= 1e-5 * np.abs(expected).max()
