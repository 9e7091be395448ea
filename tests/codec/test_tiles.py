"""The choice of a tile against the times of all tiles that were measured on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from megakernel_tts.kernels.codec_structs import Epilogue, ProjectionParams
from megakernel_tts.kernels.codec_tiles import choose_tile, choose_tiling, num_k_splits
from megakernel_tts.kernels.codec_warpgroup_tiles import (
    WARPGROUP_TILES,
    WarpgroupTile,
    sum_of_rounds,
    warpgroup_columns,
)

_FILE = Path(__file__).parents[2] / "bench/results/codec-tiles-h200.json"
_NUM_SMS = 132


@pytest.mark.parametrize(("num_frames", "most"), [(1, 1.02), (8, 1.02), (64, 1.01), (256, 1.01)])
def test_chosen_tiles_are_nearly_the_fastest(num_frames: int, most: float) -> None:
    """In sum over the projections of different shapes, without those of units as one launch."""
    layers = json.loads(_FILE.read_text())[f"us_of_{num_frames}_frames"]["launches"]
    launches: list[dict[str, Any]] = []
    for layer in layers:
        is_separate = layer.get("chosen") == "separate"
        launches += layer["separate"] if is_separate else [layer]
    chosen_us = fastest_us = 0.0
    for launch in launches:
        if "shape" not in launch:
            continue  # no projection
        rows, columns, taps, channels, dilation, planes, epilogue, out_channels = launch["shape"]
        params = ProjectionParams(
            num_rows=rows,
            num_columns=columns,
            num_taps=taps,
            dilation=dilation,
            epilogue=epilogue,
        )
        params.input.num_channels, params.input.num_planes = channels, planes
        params.input.rows_per_frame = rows // num_frames
        params.input.history_rows = (taps - 1) * dilation
        params.output.num_channels = out_channels
        params.num_k_splits = num_k_splits(params)
        if taps == 1 and epilogue == Epilogue.SNAKE:  # the end of a residual unit
            params.residual = params.residual_out = 1
        params.warpgroup_columns = warpgroup_columns(params)
        us = launch["us_by_tile"]
        params.input.is_tiled = choose_tiling(params, _NUM_SMS)
        chosen_us += us[choose_tile(params, _NUM_SMS).kernel]
        fastest_us += min(us.values())
    assert fastest_us > 0
    assert chosen_us <= most * fastest_us


@pytest.mark.parametrize("channels", [96, 384, 768])
def test_warpgroup_tiles_are_chosen_for_many_frames(channels: int) -> None:
    """For the 7-tap convolutions. One frame has tiles of few rows, except with 96 channels.

    Those of 192 channels are parts of units.
    """
    rows_per_frame = {96: 1920, 384: 160, 768: 32}[channels]
    for num_frames in (1, 64, 256):
        params = ProjectionParams(
            num_rows=num_frames * rows_per_frame,
            num_columns=channels,
            num_taps=7,
            dilation=1,
            epilogue=Epilogue.SNAKE,
        )
        params.input.num_channels, params.input.num_planes = channels, 1
        params.input.rows_per_frame = rows_per_frame
        params.output.num_channels = channels
        params.num_k_splits = num_k_splits(params)
        params.warpgroup_columns = warpgroup_columns(params)
        tile = choose_tile(params, _NUM_SMS)
        assert isinstance(tile, WarpgroupTile) == (num_frames > 1 or channels == 96), num_frames


def warpgroup_params(taps: int, channels: int) -> ProjectionParams:
    """A layer of 192 columns whose weights are packed for 96."""
    params = ProjectionParams(
        num_rows=640, num_columns=192, num_taps=taps, dilation=1, epilogue=Epilogue.SNAKE
    )
    params.input.num_channels, params.input.num_planes = channels, 1
    params.input.rows_per_frame = 640
    params.output.num_channels = 192
    params.warpgroup_columns = 96
    return params


def fitting_warpgroup_tiles(params: ProjectionParams) -> list[WarpgroupTile]:
    return [tile for tile in WARPGROUP_TILES if tile.fits(params)]


@pytest.mark.parametrize(("channels", "fits"), [(96, True), (128, False), (192, True)])
def test_a_warpgroup_tile_fits_whole_stages(channels: int, fits: bool) -> None:
    """Of a layer of one tap, whose stages have several steps of channels."""
    fitting = fitting_warpgroup_tiles(warpgroup_params(1, channels))
    assert {tile.stage_steps for tile in fitting} == ({3} if fits else set())


def test_a_warpgroup_tile_fits_only_what_its_kernel_computes() -> None:
    assert len(fitting_warpgroup_tiles(warpgroup_params(2, 192))) == 1
    gelu, two_planes, one_tile, long_window = (warpgroup_params(2, 192) for _ in range(4))
    gelu.epilogue = Epilogue.GELU
    two_planes.input.num_planes = 2
    one_tile.num_columns = 96
    long_window.dilation = 17  # 81 rows, copied as 84
    assert fitting_warpgroup_tiles(gelu) == []
    assert fitting_warpgroup_tiles(two_planes) == []
    assert fitting_warpgroup_tiles(one_tile) == []  # the consumers have other columns
    assert fitting_warpgroup_tiles(long_window) == []


def test_a_tile_without_registers_for_a_residual_fits_no_layer_that_has_one() -> None:
    params = warpgroup_params(7, 384)
    params.num_columns, params.warpgroup_columns = 384, 128
    assert len(fitting_warpgroup_tiles(params)) == 1
    params.residual = 1
    assert fitting_warpgroup_tiles(params) == []


@pytest.mark.parametrize("num_items", [1, 4, 5, 12, 13, 17, 24])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_rounds_have_all_items(num_items: int, warpgroups: int) -> None:
    """The last one has the least number of items for each of four thread blocks."""
    counts: list[int] = []

    def round_us(count: int) -> float:
        counts.append(count)
        return 1.0

    sum_us = sum_of_rounds(num_items, warpgroups, 4, round_us)
    *last, full = counts
    num_blocks, num_full_rounds = min(num_items, 4), round(sum_us) - len(last)
    rest = num_items - num_full_rounds * warpgroups * num_blocks
    assert full == warpgroups
    assert 0 <= rest < warpgroups * num_blocks
    assert last == ([-(-rest // num_blocks)] if rest else [])


def linear(channels: int = 128, columns: int = 128, taps: int = 1) -> ProjectionParams:
    params = ProjectionParams(
        num_rows=256, num_columns=columns, num_taps=taps, dilation=1, epilogue=Epilogue.GELU
    )
    params.input.num_channels, params.input.num_planes = channels, 1
    params.input.rows_per_frame = 4
    params.warpgroup_columns = 64
    return params


def test_a_tile_of_tiled_activations_fits_linear_layers_without_norm() -> None:
    with_history, normed = linear(), linear()
    with_history.input.history_rows = 1
    normed.norm_channels = 128
    refused = (with_history, normed, linear(taps=4), linear(channels=96), linear(columns=192))
    assert [tile.is_tiled for tile in fitting_warpgroup_tiles(linear())] == [True]
    assert [fitting_warpgroup_tiles(params) for params in refused] == [[]] * len(refused)


def transposed(
    rows_per_frame: int, channels: int = 384, tile_columns: int = 96
) -> ProjectionParams:
    params = ProjectionParams(
        num_rows=64 * rows_per_frame,
        num_columns=768,
        num_taps=2,
        dilation=1,
        epilogue=Epilogue.SNAKE,
    )
    params.input.num_channels, params.input.num_planes = channels, 1
    params.input.rows_per_frame, params.input.history_rows = rows_per_frame, 1
    params.warpgroup_columns = tile_columns
    return params


def test_a_tile_of_tiled_activations_fits_convolutions_of_two_taps() -> None:
    def tiled(params: ProjectionParams) -> set[tuple[int, int]]:
        """Rows before a tile, and resident steps, of the tiles."""
        fitting = [tile for tile in fitting_warpgroup_tiles(params) if tile.is_tiled]
        return {(tile.halo_rows, tile.resident_steps) for tile in fitting}

    assert tiled(transposed(160)) == {(18, 0)}
    assert tiled(transposed(160, tile_columns=192)) == {(2, 0)}
    assert tiled(transposed(4, tile_columns=192)) == set()
    assert tiled(transposed(640, channels=192)) == {(18, 0), (2, 12)}
    assert tiled(transposed(4)) == {(18, 0)}  # 16 interleaved frames
    longer_history, dilated, linear_epilogue, residual = (transposed(160) for _ in range(4))
    longer_history.input.history_rows = 2
    dilated.dilation = 2
    linear_epilogue.epilogue = Epilogue.LINEAR
    residual.residual = 1
    for refused in (longer_history, dilated, linear_epilogue, residual):
        assert tiled(refused) == set()


@pytest.mark.parametrize("channels", [96, 192, 384, 768])
@pytest.mark.parametrize("rows_per_frame", [4, 32, 160, 640])
def test_weights_of_transposed_convolutions_are_packed_for_a_tile(
    rows_per_frame: int, channels: int
) -> None:
    """For any number of rows of a frame of the released codec and of the demo voice's."""
    params = transposed(rows_per_frame)
    params.num_columns, params.output.num_channels = 4 * channels, channels
    params.warpgroup_columns = warpgroup_columns(params)
    assert any(tile.is_tiled for tile in fitting_warpgroup_tiles(params))


@pytest.mark.parametrize(("num_sms", "num_blocks"), [(132, 128), (8, 8), (7, 8), (1, 8)])
def test_thread_blocks_with_resident_weights_are_a_multiple_of_the_tiles_of_columns(
    num_sms: int, num_blocks: int
) -> None:
    params = transposed(640, channels=192)
    (tile,) = (tile for tile in fitting_warpgroup_tiles(params) if tile.resident_steps)
    assert tile.num_blocks(params, num_sms) == num_blocks
