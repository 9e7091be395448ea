"""Tiled activations, with emulated kernels on the CPU: they change neither samples nor states."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.decoder import DecodeRequest, PendingDecodeRequest
from megakernel_tts.kernels.codec_structs import Epilogue, ProjectionParams, ResidualUnitParams
from megakernel_tts.kernels.codec_tiles import AnyTile
from megakernel_tts.kernels.codec_unit_tiles import RESIDUAL_UNIT_TILES, ResidualUnitTile
from megakernel_tts.kernels.codec_warpgroup_tiles import (
    WARPGROUP_TILES,
    interleaved_frames,
)
from tests.codec.decoding import (
    Codec,
    RandomTiles,
    RandomWarpgroupTiles,
    can_read_tiled_rows,
    decode_chunks,
    joined,
    small_codec,
    some_codes,
)
from tests.emulator.codec import emulated_codec_kernels


def make(codec: Codec, num_sms: int = 4, **choices: Any) -> CudaDecoder:
    """A decoder of three slots."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return CudaDecoder(*codec, slots=3, kernels=emulated_codec_kernels(num_sms, **choices))


def test_tiled_linear_layers_do_not_change_samples(tmp_path: Path) -> None:
    """In a call of more than a tile of rows, between two whose activations are not tiled."""
    codec = small_codec(tmp_path, latent_dim=256)
    plain = make(codec, choose_tiling=lambda *_: False)
    tiles = RandomTiles(0)

    def prefer(params: ProjectionParams, num_sms: int) -> bool:
        return params.num_rows > 6 and can_read_tiled_rows(params, num_sms)

    other = make(codec, choose=tiles, choose_tiling=prefer)
    codes = [some_codes(10, seed) for seed in range(3)]
    for slot in range(3):
        other.load_slot(slot)
    made: list[list[NDArray[np.int16]]] = [[], [], []]
    for start, end in ((0, 1), (1, 9), (9, 10)):
        requests = [DecodeRequest(slot, codes[slot][start:end]) for slot in range(3)]
        for slot, samples in enumerate(other.decode(requests)()):
            assert samples is not None
            made[slot].append(samples)
    for slot in range(3):
        expected = decode_chunks(plain, slot, codes[slot], [1, 8, 1])
        np.testing.assert_array_equal(joined(made[slot]), expected)
    assert tiles.used >= {tile for tile in WARPGROUP_TILES if tile.copies_stages}


class TiledConvolutions(RandomWarpgroupTiles):
    """Chooses tiles of sm_90a.

    Attributes:
        inputs: Taps and interleaved frames of the convolutions whose input is tiled.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.inputs: set[tuple[int, int]] = set()

    def __call__(self, params: ProjectionParams, num_sms: int) -> AnyTile:
        if params.input.is_tiled and params.epilogue.value == Epilogue.SNAKE:
            num_frames = interleaved_frames(params.input.rows_per_frame)
            self.inputs.add((params.num_taps, num_frames))
        return super().__call__(params, num_sms)


@pytest.mark.parametrize(
    ("decoder_dim", "rates", "inputs", "columns_and_resident_steps"),
    [
        (768, [8, 4, 2, 2], {(2, 16), (2, 2), (2, 1)}, {(192, 0), (96, 0), (96, 12)}),
        (384, [24, 2, 2, 2], {(2, 16), (2, 2)}, {(96, 0), (96, 12)}),
        (384, [16, 2, 2, 2], {(2, 16), (2, 1)}, {(96, 0), (96, 12)}),
    ],
)
def test_tiled_convolutions_change_neither_samples_nor_states(
    tmp_path: Path,
    decoder_dim: int,
    rates: list[int],
    inputs: set[tuple[int, int]],
    columns_and_resident_steps: set[tuple[int, int]],
) -> None:
    """Frames of a call are of one or several streams, with a history or none; some are discarded.

    Rows before a tile are of the same frame, of the one before, or of the history.
    """
    codec = small_codec(tmp_path, rates, decoder_dim=decoder_dim)
    plain = make(codec, choose_tiling=lambda *_: False, choose_unit=lambda *_: None)
    tiles = TiledConvolutions(0)
    tiled_units: set[tuple[int, int]] = set()  # columns, dilation

    def choose_unit(params: ResidualUnitParams, _: int) -> ResidualUnitTile | None:
        if params.convolution.input.is_tiled:
            tiled_units.add((params.convolution.num_columns, params.convolution.dilation))
        return next((tile for tile in RESIDUAL_UNIT_TILES if tile.fits(params)), None)

    other = make(
        codec, num_sms=3, choose=tiles, choose_unit=choose_unit, choose_tiling=can_read_tiled_rows
    )
    codes = [some_codes(8, seed) for seed in range(3)]
    made: list[list[NDArray[np.int16]]] = [[], [], []]
    at = [0, 0, 0]
    for slot in range(3):
        other.load_slot(slot)
    # Slots with frames of a call, and frames that are kept.
    for call in (((1, 2, 2), (0, 1, 1)), ((0, 3, 2), (2, 2, 1), (1, 1, 1)), ((2, 1, 1), (0, 3, 3))):
        requests = [
            PendingDecodeRequest(
                slot, codes[slot][at[slot] : at[slot] + count].numpy(), np.empty((0, 16), np.int32)
            )
            for slot, count, _ in call
        ]
        confirm = other.decode_pending(requests)
        assert other.stages(sum(count for _, count, _ in call))  # a query, which changes nothing
        made_now = confirm([count for _, _, count in call])()
        for (slot, _, count), samples in zip(call, made_now, strict=True):
            assert samples is not None
            made[slot].append(samples)
            at[slot] += count
    for slot in range(3):
        expected = decode_chunks(plain, slot, codes[slot][: at[slot]], [at[slot]])
        np.testing.assert_array_equal(joined(made[slot]), expected)
        assert torch.equal(other.save_slot(slot).history, plain.save_slot(slot).history)
    assert tiles.inputs == inputs
    assert {dilation for _, dilation in tiled_units} == {3, 9}
    used = {tile for tile in WARPGROUP_TILES if tile in tiles.used and tile.halo_rows}
    assert {(tile.columns, tile.resident_steps) for tile in used} == columns_and_resident_steps
