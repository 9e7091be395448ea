"""The choice between one launch of a residual unit and two."""

import json
from pathlib import Path

import pytest

from megakernel_tts.kernels.codec_structs import Epilogue, ProjectionParams, ResidualUnitParams
from megakernel_tts.kernels.codec_tiles import num_k_splits, warpgroup_columns
from megakernel_tts.kernels.codec_unit_tiles import (
    RESIDUAL_UNIT_TILES,
    choose_unit_tile,
    fitting_unit_tiles,
)

_FILE = Path(__file__).parents[2] / "bench/results/codec-tiles-h100.json"
_NUM_SMS = 132
_ROWS_PER_FRAME = {96: 1920, 192: 640, 384: 160, 768: 32}  # by channels


def unit(channels: int, num_frames: int, dilation: int = 1) -> ResidualUnitParams:
    """A unit of the released codec whose weights are packed for warpgroups."""
    params = ResidualUnitParams()
    for projection, taps in ((params.convolution, 7), (params.pointwise, 1)):
        _fill(projection, channels, num_frames, taps, dilation)
    params.pointwise.residual = params.pointwise.residual_out = 1
    return params


def _fill(params: ProjectionParams, channels: int, frames: int, taps: int, dilation: int) -> None:
    rows_per_frame = _ROWS_PER_FRAME[channels]
    params.num_rows = frames * rows_per_frame
    params.num_columns = params.input.num_channels = params.output.num_channels = channels
    params.input.num_planes = params.output.num_planes = 1
    params.input.rows_per_frame = rows_per_frame
    params.num_taps, params.dilation = taps, dilation
    params.epilogue = Epilogue.SNAKE
    params.num_k_splits = num_k_splits(params)
    params.warpgroup_columns = warpgroup_columns(params)


@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize("channels", [96, 192])
def test_units_are_one_launch_for_many_frames(channels: int, dilation: int) -> None:
    for num_frames in (1, 64, 256):
        tile = choose_unit_tile(unit(channels, num_frames, dilation), _NUM_SMS)
        assert (tile is not None) == (num_frames > 1), num_frames
        assert tile is None or tile.columns == channels


def test_a_tile_fits_only_units_that_its_kernel_computes() -> None:
    for channels in (96, 192, 384, 768):
        of_width = [tile for tile in RESIDUAL_UNIT_TILES if tile.columns == channels]
        assert fitting_unit_tiles(unit(channels, 64)) == of_width
    without_residual, not_packed, long_windows = (unit(96, 64) for _ in range(3))
    without_residual.pointwise.residual = None
    not_packed.convolution.warpgroup_columns = 0
    long_windows.convolution.dilation = 10
    for params in (without_residual, not_packed, long_windows):
        assert fitting_unit_tiles(params) == []


@pytest.mark.parametrize("num_frames", [8, 64, 256])
def test_chosen_launches_are_nearly_the_fastest(num_frames: int) -> None:
    """In sum over the residual units."""
    layers = json.loads(_FILE.read_text())[f"us_of_{num_frames}_frames"]["launches"]
    units = [layer for layer in layers if "unit_shape" in layer]
    if not units:
        pytest.skip("no residual unit was measured as one launch")
    chosen_us = 0.0
    for layer in units:
        dilation, channels = layer["unit_shape"][4], layer["unit_shape"][3]
        tile = choose_unit_tile(unit(channels, num_frames, dilation), _NUM_SMS)
        chosen_us += layer["us_by_tile"]["separate" if tile is None else tile.kernel]
    assert chosen_us <= 1.01 * sum(min(layer["us_by_tile"].values()) for layer in units)
