"""The tiles of the codec's projection kernels, and the choice between them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megakernel_tts.kernels.codec_structs import (
    BLOCK_THREADS,
    STEP_CHANNELS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    Epilogue,
    ProjectionParams,
)

# Of csrc/codec/many_rows.cuh.
_MANY_ROW_STAGES = 4
_ROW_POOL_SIZE = 3328  # units of 16 bytes
_MAX_WINDOW_ROWS = 448
_NUM_WARPS = BLOCK_THREADS // 32
COLUMN_PARAMS_BYTES = 16


@dataclass(frozen=True)
class Tile:
    """A tile of the projection kernel; `Tile` in csrc/codec/projection.cuh.

    Attributes:
        row_groups: Groups of 8 rows of a warp.
        column_groups: Groups of 8 columns of a warp.
        k_splits: Warps that split K.
        planes: Planes of the input.
    """

    row_groups: int
    column_groups: int
    k_splits: int
    planes: int

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return 8 * self.row_groups * (_NUM_WARPS // self.k_splits)

    @property
    def columns(self) -> int:
        """Columns of a thread block."""
        return 8 * self.column_groups

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks of a multiprocessor."""
        small = self.row_groups <= 2 and self.column_groups <= 2
        return 2 if small and self.planes == 1 else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return BLOCK_THREADS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: padded sums, and the sums of squares of the RMS norm."""
        return 4 * self.k_splits * self.rows * (self.columns + 8 + 1)

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return f"codec_project_{self.row_groups}_{self.column_groups}_{self.k_splits}_{self.planes}"

    def num_blocks(self, params: ProjectionParams) -> int:
        """Thread blocks of a launch."""
        return -(-params.num_rows // self.rows) * (params.num_columns // self.columns)


# (Splits of K, planes) -> groups of rows and of columns of the tiles; of equal estimates the first
# one is chosen. Only sizes that some GPU would choose for the released codec.
_SIZES = {
    (2, 1): ((2, 1), (2, 2), (4, 4), (8, 4)),
    (4, 1): ((2, 2), (2, 4), (4, 4), (8, 4)),
    (8, 1): ((2, 2), (2, 4), (4, 4), (8, 4)),
    (2, 2): ((2, 1), (2, 2), (2, 4), (4, 4)),
    (4, 2): ((2, 1), (2, 4), (4, 4)),
    (8, 2): ((2, 1), (2, 4), (4, 4), (1, 1), (1, 2), (1, 4)),
}


def _tiles(k_splits: int, planes: int) -> Iterator[Tile]:
    """The tiles for a layer."""
    for row_groups, column_groups in _SIZES[k_splits, planes]:
        yield Tile(row_groups, column_groups, k_splits, planes)


TILES = tuple(tile for splits_and_planes in _SIZES for tile in _tiles(*splits_and_planes))


def _max_frames(num_rows: int, rows_per_frame: int) -> int:
    """The most frames of which a tile has rows; it begins at a multiple of `num_rows` rows."""
    if num_rows % rows_per_frame == 0:
        return num_rows // rows_per_frame
    if rows_per_frame % num_rows == 0:
        return 1
    return (num_rows + rows_per_frame - 2) // rows_per_frame + 1


@dataclass(frozen=True)
class ManyRowTile:
    """A tile of the projection kernel of many rows; `ManyRowTile` in csrc/codec/many_rows.cuh.

    Attributes:
        row_groups: Groups of 8 rows of a warp.
        column_groups: Groups of 8 columns of a warp.
        row_warps: Warps with different rows; the others have different columns.
        planes: Planes of the input.
    """

    row_groups: int
    column_groups: int
    row_warps: int
    planes: int

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return 8 * self.row_groups * self.row_warps

    @property
    def columns(self) -> int:
        """Columns of a thread block."""
        return 8 * self.column_groups * (_NUM_WARPS // self.row_warps)

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks of a multiprocessor, by their registers."""
        return 2 if self.row_groups * self.column_groups * self.planes <= 16 else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return BLOCK_THREADS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: stages of weights, windows of rows, addresses of rows."""
        weights = _MANY_ROW_STAGES * self.columns * 2 * STEP_CHANNELS
        return weights + 16 * _ROW_POOL_SIZE + 8 * _MAX_WINDOW_ROWS

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return (
            f"codec_project_many_{self.row_groups}_{self.column_groups}_{self.row_warps}"
            f"_{self.planes}"
        )

    def num_blocks(self, params: ProjectionParams) -> int:
        """Thread blocks of a launch."""
        return -(-params.num_rows // self.rows) * (params.num_columns // self.columns)

    def fits(self, params: ProjectionParams) -> bool:
        """Whether a launch has whole tiles of columns, and its windows of rows fit."""
        taps = params.num_taps
        num_frames = _max_frames(self.rows, params.input.rows_per_frame)
        window_rows = self.rows + num_frames * (taps - 1) * params.dilation
        num_windows = (_MANY_ROW_STAGES - 2 + taps) // taps + 1
        return (
            self.planes == params.input.num_planes
            and params.num_columns % self.columns == 0
            and window_rows <= _MAX_WINDOW_ROWS
            and 4 * num_windows * self.planes * window_rows <= _ROW_POOL_SIZE
        )


MANY_ROW_TILES = tuple(
    ManyRowTile(*sizes)
    for sizes in (
        (4, 6, 4, 1),
        (4, 4, 4, 1),
        (4, 3, 4, 1),
        (4, 4, 2, 2),
        (4, 3, 2, 2),
        (4, 6, 4, 2),
    )
)


BlockRows = Literal["separate", "shared", "tiled"]


def _interleaved_frames(params: ProjectionParams) -> int:
    """Frames of which a warpgroup has rows; `InterleavedWindow` in csrc/codec/row_window.cuh."""
    return WARPGROUP_ROWS // math.gcd(WARPGROUP_ROWS, params.input.rows_per_frame)


@dataclass(frozen=True)
class WarpgroupTile:
    """A tile of the projection kernel of sm_90a; `WarpgroupTile` in csrc/codec/warpgroup_tile.cuh.

    Attributes:
        columns: Columns of a warpgroup.
        warpgroups: Warpgroups that multiply, 64 rows each.
        planes: Planes of the input.
        stage_steps: Steps of K that are copied at once: the taps of a step of channels, or for one
            tap as many steps of channels.
        stages: Stages in shared memory.
        window_rows: The most rows of a window of a stage.
        block_rows: The rows of the warpgroups: "separate", each has other rows and the same
            columns; "shared", the same rows and other columns; "tiled", the same, and the input
            is tiled (`Activations` in csrc/codec/params.cuh).
    """

    columns: int
    warpgroups: int
    planes: int
    stage_steps: int
    stages: int
    window_rows: int
    block_rows: BlockRows

    @property
    def template_arguments(self) -> str:
        """Of the tile in C++."""
        return (
            f"{self.columns}, {self.warpgroups}, {self.planes}, {self.stage_steps}, {self.stages}, "
            f"{self.window_rows}, BlockRows::k{self.block_rows.capitalize()}"
        )

    @property
    def is_tiled(self) -> bool:
        """Whether the input is tiled."""
        return self.block_rows == "tiled"

    @property
    def shares_rows(self) -> bool:
        """Whether the warpgroups have the same rows and other columns."""
        return self.block_rows != "separate"

    @property
    def row_tiles(self) -> int:
        """Tiles of 64 rows of a thread block."""
        return 1 if self.shares_rows else self.warpgroups

    @property
    def column_tiles(self) -> int:
        """Tiles of `columns` columns of a thread block."""
        return self.warpgroups if self.shares_rows else 1

    @property
    def reads_residual(self) -> bool:
        """Whether the kernel reads residuals."""
        return self.columns * (1 + self.planes) <= 192

    @property
    def threads(self) -> int:
        """Threads of a block: of warpgroups that multiply, and of one or two that copy."""
        copying = 1 if self.warpgroups == 3 or self.is_tiled else 2
        return WARPGROUP_THREADS * (self.warpgroups + copying)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: `stage_bytes`, and the columns' parameters for every warp."""
        params = 4 * self.warpgroups * self.columns * COLUMN_PARAMS_BYTES
        return self.stage_bytes + params

    @property
    def stage_bytes(self) -> int:
        """Shared memory of stages of weights and rows, addresses of rows, and mbarriers."""
        weights = self.stages * self.stage_steps * self.columns * 2 * STEP_CHANNELS
        steps = self.stage_steps if self.is_tiled else 1  # of a window
        windows = self.stages * steps * self.planes * self.window_rows * 2 * STEP_CHANNELS
        addresses = 8 * self.window_rows
        mbarriers = 2 * 8 * self.stages * (1 + self.row_tiles)
        return self.column_tiles * weights + self.row_tiles * (windows + addresses) + mbarriers

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        name = f"codec_project_warpgroups_{self.columns}_{self.stage_steps}_{self.planes}"
        return name if self.block_rows == "separate" else f"{name}_{self.block_rows}_rows"

    def num_items(self, params: ProjectionParams) -> int:
        """Tiles of one warpgroup of a launch, of which a thread block computes several."""
        if self.is_tiled:
            num_windows = -(-params.num_rows // WARPGROUP_ROWS)
            return num_windows * (params.num_columns // self.columns)
        rows_per_frame, frames = params.input.rows_per_frame, _interleaved_frames(params)
        num_frames = -(-params.num_rows // (rows_per_frame * frames)) * frames
        num_windows = num_frames * rows_per_frame // WARPGROUP_ROWS
        column_tiles = params.num_columns // self.columns
        if column_tiles > 1:
            num_windows = -(-num_windows // self.row_tiles) * self.row_tiles
        return num_windows * column_tiles

    def fits(self, params: ProjectionParams) -> bool:
        """Whether the weights of a launch are packed for the tile, and its windows of rows fit."""
        taps, num_frames = params.num_taps, _interleaved_frames(params)
        window_rows = WARPGROUP_ROWS + num_frames * (taps - 1) * params.dilation
        window_rows = -(-window_rows // 4) * 4  # four are copied at once
        if self.is_tiled and (taps > 1 or params.input.history_rows or params.norm_channels):
            return False
        num_steps = taps * params.input.num_channels // STEP_CHANNELS
        return (
            self.planes == params.input.num_planes
            and self.columns == params.warpgroup_columns
            and params.num_columns % (self.columns * self.column_tiles) == 0
            and taps in (1, self.stage_steps)
            and num_steps % self.stage_steps == 0
            and (self.is_tiled or window_rows * self.stage_steps // taps <= self.window_rows)
            and (self.reads_residual or not params.residual)
            and (self.warpgroups == 1 or self.is_tiled or params.epilogue.value == Epilogue.SNAKE)
        )


WARPGROUP_TILES = tuple(
    WarpgroupTile(*sizes)
    for sizes in (
        (96, 2, 1, 7, 3, 178, "separate"),
        (128, 2, 1, 7, 2, 178, "separate"),
        (96, 2, 1, 3, 4, 194, "shared"),
        (96, 2, 2, 2, 6, 82, "separate"),
        (96, 2, 2, 2, 6, 82, "shared"),
        (64, 2, 2, 4, 3, 64, "tiled"),
        (64, 1, 2, 4, 4, 258, "separate"),
        (64, 1, 2, 7, 4, 162, "separate"),
    )
)


def warpgroup_columns(params: ProjectionParams) -> int:
    """Columns of the tiles that a layer's weights are packed for on sm_90a; 0: none.

    The convolutions of the decoder's blocks have wide tiles. Those of one tap load and store more
    for each product, and are faster with narrow tiles. The first convolution and the layers of the
    upsampling stages have few rows, and the narrowest tiles. Layers of one row for each frame have
    none.
    """
    two_planes, channels = params.input.num_planes == 2, params.output.num_channels
    if two_planes and params.num_taps != 2:
        if params.input.rows_per_frame == 1:
            return 0
        epilogues = (Epilogue.LINEAR, Epilogue.SNAKE, Epilogue.GELU)
        return 64 if params.epilogue.value in epilogues and channels % 64 == 0 else 0
    if params.epilogue.value != Epilogue.SNAKE or channels % 96:
        return 0
    if params.num_taps > 1 and not two_planes:
        return {192: 192, 384: 128}.get(params.num_columns, 96)
    return 96


def num_k_splits(params: ProjectionParams) -> int:
    """Warps that split K: as many as have work for a single frame.

    A property of the layer, so that the number of rows does not change the order of the sums.
    """
    num_steps = params.num_taps * params.input.num_channels // STEP_CHANNELS
    num_tiles = params.input.rows_per_frame * params.num_columns // 512
    wanted = 8 if num_tiles < 200 else 4 if num_tiles < 300 else 2
    if num_steps >= 2 * wanted:
        return wanted
    return 4 if num_steps >= 8 else 2


def _estimate_us(tile: Tile, params: ProjectionParams, num_sms: int) -> float:
    """Estimated time of a launch, fitted to the times of bench.codec_tiles on an H200.

    The terms are launch and tail of every wave of blocks, and the loads of a multiprocessor through
    its first-level cache.
    """
    num_steps = params.num_taps * params.input.num_channels // STEP_CHANNELS
    num_blocks = tile.num_blocks(params)
    num_waves = -(-num_blocks // (tile.blocks_per_sm * num_sms))
    blocks_per_sm = -(-num_blocks // num_sms)
    groups = tile.row_groups * tile.planes + tile.column_groups
    return (
        num_waves * (1.8 + 7.8e-4 * tile.rows * tile.columns)
        + blocks_per_sm * 0.057 * num_steps / tile.k_splits * groups
    )


def _estimate_many_rows_us(tile: ManyRowTile, params: ProjectionParams, num_sms: int) -> float:
    """Estimated time of a launch of many rows, fitted in the same way.

    Every wave of blocks has a prologue, an epilogue that grows with the tile, and the matrix
    instructions of each step. A block that is alone on its multiprocessor overlaps less.
    """
    num_steps = params.num_taps * params.input.num_channels // STEP_CHANNELS
    num_blocks = tile.num_blocks(params)
    num_waves = -(-num_blocks // (tile.blocks_per_sm * num_sms))
    products = tile.rows * tile.columns * (2.6e-5 + 3.7e-5 * tile.planes * num_steps)
    solo_factor = 1.07 if tile.blocks_per_sm == 1 else 1.0
    return solo_factor * num_waves * (10.0 + tile.blocks_per_sm * products)


def sum_of_rounds(
    num_items: int, warpgroups: int, num_sms: int, round_us: Callable[[int], float]
) -> float:
    """The time of all rounds of a launch, see `WarpgroupSchedule` in csrc/codec/warpgroup_tile.cuh.

    Args:
        num_items: Of the launch.
        warpgroups: Of a thread block that multiply.
        num_sms: Multiprocessors of the GPU.
        round_us: The time of a round in which a thread block has a number of items.
    """
    num_blocks = max(min(num_items, num_sms), 1)
    num_full_rounds, rest = divmod(num_items, num_blocks * warpgroups)
    last_us = round_us(-(-rest // num_blocks)) if rest else 0.0
    return num_full_rounds * round_us(warpgroups) + last_us


def _estimate_warpgroups_us(tile: WarpgroupTile, params: ProjectionParams, num_sms: int) -> float:
    """Estimated time of a launch on sm_90a, fitted in the same way.

    Every round of a block has a prologue, the products of its steps, the copies of its windows, and
    an epilogue that reads and writes global memory.
    """
    num_channel_steps = params.input.num_channels // STEP_CHANNELS
    value_bytes = 2 + 4 * bool(params.residual) + 4 * bool(params.residual_out)
    copy_us = 0.01 if tile.is_tiled else 0.075 if tile.warpgroups == 1 else 0.043

    def round_us(count: int) -> float:
        products = 6.6e-4 * count * tile.columns * params.num_taps * tile.planes * num_channel_steps
        row_tiles = 1 if tile.shares_rows else count
        copies = copy_us * row_tiles * tile.planes * num_channel_steps
        accesses = 7.2e-6 * WARPGROUP_ROWS * count * tile.columns * value_bytes
        return (6.0 if tile.is_tiled else 4.0) + products + copies + accesses

    return 1.2 + sum_of_rounds(tile.num_items(params), tile.warpgroups, num_sms, round_us)


AnyTile = Tile | ManyRowTile | WarpgroupTile


def reads_tiled_rows(tile: AnyTile) -> bool:
    """Whether the kernel of a tile reads tiled activations."""
    return isinstance(tile, WarpgroupTile) and tile.is_tiled


def all_fitting_tiles(params: ProjectionParams) -> list[AnyTile]:
    """The tiles that a launch may have if its input is tiled or not."""
    tiles = _tiles(params.num_k_splits, params.input.num_planes)
    few = [tile for tile in tiles if params.num_columns % tile.columns == 0]
    many = (tile for tile in (*MANY_ROW_TILES, *WARPGROUP_TILES) if tile.fits(params))
    return [*few, *many]


def _estimate_any_us(tile: AnyTile, params: ProjectionParams, num_sms: int) -> float:
    if isinstance(tile, Tile):
        return _estimate_us(tile, params, num_sms)
    if isinstance(tile, WarpgroupTile):
        return _estimate_warpgroups_us(tile, params, num_sms)
    return _estimate_many_rows_us(tile, params, num_sms)


def fitting_tiles(params: ProjectionParams) -> list[AnyTile]:
    """The tiles that a launch may have, whose kernels read the input as it is stored."""
    is_tiled = bool(params.input.is_tiled)
    return [tile for tile in all_fitting_tiles(params) if reads_tiled_rows(tile) == is_tiled]


def choose_tile(params: ProjectionParams, num_sms: int) -> AnyTile:
    """The tile with the least estimated time.

    Args:
        params: The launch.
        num_sms: Multiprocessors of the GPU.
    """
    return min(fitting_tiles(params), key=lambda tile: _estimate_any_us(tile, params, num_sms))


def prefers_tiled_rows(params: ProjectionParams, num_sms: int) -> bool:
    """Whether a launch is estimated to take less time if its input is tiled.

    Args:
        params: The launch.
        num_sms: Multiprocessors of the GPU.
    """
    fitting = all_fitting_tiles(params)
    best = min(fitting, key=lambda tile: _estimate_any_us(tile, params, num_sms))
    return reads_tiled_rows(best)


def least_time_us(params: ProjectionParams, num_sms: int) -> float:
    """The estimated time of the tile that `choose_tile` returns."""
    return _estimate_any_us(choose_tile(params, num_sms), params, num_sms)


ChooseTile = Callable[[ProjectionParams, int], AnyTile]
PreferTiledRows = Callable[[ProjectionParams, int], bool]
