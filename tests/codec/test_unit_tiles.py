"""The choice between one launch of a residual unit and two."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megakernel_tts.kernels.codec_structs import Epilogue, ProjectionParams, ResidualUnitParams
from megakernel_tts.kernels.codec_tiles import num_k_splits
from megakernel_tts.kernels.codec_unit_tiles import (
    RESIDUAL_UNIT_TILES,
    ResidualUnitTile,
    choose_unit_tile,
    estimate_unit_us,
    fitting_unit_tiles,
)
from megakernel_tts.kernels.codec_warpgroup_tiles import warpgroup_columns

_FILE = Path(__file__).parents[2] / "bench/results/codec-tiles-h200.json"
_NUM_SMS = 132
_ROWS_PER_FRAME = {96: 1920, 192: 640, 384: 160, 768: 32}  # by channels


def unit(channels: int, num_frames: int, dilation: int = 1) -> ResidualUnitParams:
    """A unit of the released codec whose weights are packed for warpgroups.

    That of dilation 9 is the last one of a block: it stores no sum.
    """
    params = ResidualUnitParams()
    for projection, taps in ((params.convolution, 7), (params.pointwise, 1)):
        _fill(projection, channels, num_frames, taps, dilation)
    params.pointwise.residual = 1
    if dilation != 9:
        params.pointwise.residual_out = 1
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
def test_units_are_one_launch(channels: int, dilation: int) -> None:
    """Except for one frame of 192 channels, which has too few rows for the GPU."""
    for num_frames in (1, 8, 64, 256):
        tile = choose_unit_tile(unit(channels, num_frames, dilation), _NUM_SMS)
        assert (tile is not None) == (num_frames > 1 or channels == 96), num_frames
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


def measured_units(num_frames: int) -> Iterator[tuple[ResidualUnitParams, dict[str, float]]]:
    """Residual units, and the times by `kernel_name`."""
    layers: list[dict[str, Any]] = json.loads(_FILE.read_text())[f"us_of_{num_frames}_frames"][
        "launches"
    ]
    for layer in layers:
        if "unit_shape" in layer:
            dilation, channels = layer["unit_shape"][4], layer["unit_shape"][3]
            yield unit(channels, num_frames, dilation), layer["us_by_tile"]


def kernel_name(tile: ResidualUnitTile | None) -> str:
    """As in the file."""
    return "separate" if tile is None else tile.kernel


@pytest.mark.parametrize("num_frames", [1, 8, 64, 256])
def test_the_fastest_launches_are_chosen(num_frames: int) -> None:
    """For every unit, also of 384 and 768 channels."""
    units = list(measured_units(num_frames))
    assert len(units) == 3 * len(_ROWS_PER_FRAME)
    for params, us in units:
        chosen = kernel_name(choose_unit_tile(params, _NUM_SMS))
        assert chosen == min(us, key=lambda kernel: us[kernel]), us


@pytest.mark.parametrize("num_frames", [1, 8, 64, 256])
def test_estimates_of_one_launch_are_within_8_percent(num_frames: int) -> None:
    estimated = 0
    for params, us in measured_units(num_frames):
        for tile in fitting_unit_tiles(params):
            estimate_us = estimate_unit_us(tile, params, _NUM_SMS)
            assert estimate_us == pytest.approx(us[kernel_name(tile)], rel=0.08)
            estimated += 1
    assert estimated == 3 * len(RESIDUAL_UNIT_TILES)
