"""The tiles of the codec's projection kernel with warpgroup instructions, on sm_90a."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megakernel_tts.kernels.codec_structs import (
    STEP_CHANNELS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    Epilogue,
    ProjectionParams,
)

COLUMN_PARAMS_BYTES = 16
BlockRows = Literal["separate", "shared"]


def interleaved_frames(rows_per_frame: int) -> int:
    """Frames of which a warpgroup has rows; see csrc/codec/activations.cuh."""
    return WARPGROUP_ROWS // math.gcd(WARPGROUP_ROWS, rows_per_frame)


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
        window_rows: The most rows of a window of a stage; of tiled rows, those of a step.
        block_rows: The rows of the warpgroups: "separate", each has other rows and the same
            columns; "shared", the same rows and other columns.
        is_tiled: Whether the input is tiled (`Activations` in csrc/codec/params.cuh). A window of
            more rows than a tile is that of a convolution of two taps.
        resident_steps: Steps of K of a layer whose weights stay in shared memory; 0: they do not.
    """

    columns: int
    warpgroups: int
    planes: int
    stage_steps: int
    stages: int
    window_rows: int
    block_rows: BlockRows
    is_tiled: bool = False
    resident_steps: int = 0

    @property
    def template_arguments(self) -> str:
        """Of the tile in C++."""
        return (
            f"{self.columns}, {self.warpgroups}, {self.planes}, {self.stage_steps}, {self.stages}, "
            f"{self.window_rows}, BlockRows::k{self.block_rows.capitalize()}, "
            f"{str(self.is_tiled).lower()}, {self.weight_steps}, "
            f"{str(self.resident_steps > 0).lower()}"
        )

    @property
    def weight_steps(self) -> int:
        """Steps of weights in shared memory."""
        return self.resident_steps or self.stages * self.stage_steps

    @property
    def shares_rows(self) -> bool:
        """Whether the warpgroups have the same rows and other columns."""
        return self.block_rows == "shared"

    @property
    def halo_rows(self) -> int:
        """The most rows before a tile that a window of tiled rows has."""
        return self.window_rows - WARPGROUP_ROWS if self.is_tiled else 0

    @property
    def copies_stages(self) -> bool:
        """Whether the rows of a stage are copied at once."""
        return self.is_tiled and not self.halo_rows

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
        return self.columns * (1 + self.planes) <= 192 and not self.halo_rows

    @property
    def is_snake(self) -> bool:
        """Whether the epilogue is always the snake."""
        return not self.copies_stages

    @property
    def threads(self) -> int:
        """Threads of a block: of warpgroups that multiply, and of one or two that copy."""
        copying = 1 if self.warpgroups == 3 or self.is_tiled else 2
        return WARPGROUP_THREADS * (self.warpgroups + copying)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: `stage_bytes`, and the columns' parameters for every warp."""
        params = 4 * self.warpgroups * self.columns * COLUMN_PARAMS_BYTES
        return -(-self.stage_bytes // 16) * 16 + params

    @property
    def stage_bytes(self) -> int:
        """Shared memory of stages of weights and rows, addresses of rows, and mbarriers."""
        weights = self.weight_steps * self.columns * 2 * STEP_CHANNELS
        steps = self.stage_steps if self.copies_stages else 1  # of a window
        windows = self.stages * steps * self.planes * self.window_rows * 2 * STEP_CHANNELS
        addresses = 8 * self.window_rows
        weight_stages = self.weight_steps // self.stage_steps
        mbarriers = 8 * (2 * weight_stages + 2 * self.stages * self.row_tiles + self.warpgroups)
        return self.column_tiles * weights + self.row_tiles * (windows + addresses) + mbarriers

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        name = f"codec_project_warpgroups_{self.columns}_{self.warpgroups}_{self.stage_steps}"
        name += f"_{self.planes}"
        if self.shares_rows:
            name += "_shared_rows"
        if self.is_tiled:
            name += "_tiled"
        return f"{name}_resident_{self.resident_steps}" if self.resident_steps else name

    def num_items(self, params: ProjectionParams) -> int:
        """Items of a launch, see `WarpgroupSchedule` in csrc/codec/warpgroup_tile.cuh."""
        rows_per_frame = params.input.rows_per_frame
        frames = interleaved_frames(rows_per_frame)
        num_frames = -(-params.num_rows // (rows_per_frame * frames)) * frames
        num_windows = num_frames * rows_per_frame // WARPGROUP_ROWS
        column_tiles = params.num_columns // self.columns
        if column_tiles > 1:
            num_windows = -(-num_windows // self.row_tiles) * self.row_tiles
        return num_windows * column_tiles

    def num_blocks(self, params: ProjectionParams, num_sms: int) -> int:
        """Thread blocks of a launch. Those with resident weights keep their tile of columns."""
        num_blocks = min(self.num_items(params), num_sms)
        if not self.resident_steps:
            return num_blocks
        column_tiles = params.num_columns // self.columns
        return max(num_blocks // column_tiles, 1) * column_tiles

    def fits(self, params: ProjectionParams) -> bool:
        """Whether the weights of a launch are packed for the tile, and its windows of rows fit."""
        taps = params.num_taps
        num_frames = interleaved_frames(params.input.rows_per_frame)
        window_rows = WARPGROUP_ROWS + num_frames * (taps - 1) * params.dilation
        window_rows = -(-window_rows // 4) * 4  # four are copied at once
        if self.is_tiled and not self._fits_tiled(params):
            return False
        num_steps = taps * params.input.num_channels // STEP_CHANNELS
        return (
            self.planes == params.input.num_planes
            and self.columns == params.warpgroup_columns
            and params.num_columns % (self.columns * self.column_tiles) == 0
            and taps in (1, self.stage_steps)
            and num_steps % self.stage_steps == 0
            and self.resident_steps in (0, num_steps)
            and (self.is_tiled or window_rows * self.stage_steps // taps <= self.window_rows)
            and (self.reads_residual or not params.residual)
            and (not self.is_snake or params.epilogue.value == Epilogue.SNAKE)
        )

    def _fits_tiled(self, params: ProjectionParams) -> bool:
        """Whether a tiled input has the rows before each tile at one distance, and they fit."""
        if params.norm_channels:
            return False
        if not self.halo_rows:
            return params.num_taps == 1 and not params.input.history_rows
        return (
            params.num_taps == 2
            and params.dilation == params.input.history_rows == 1
            and interleaved_frames(params.input.rows_per_frame) <= self.halo_rows
        )


WARPGROUP_TILES = (
    WarpgroupTile(96, 2, 1, 7, 3, 178, "separate"),
    WarpgroupTile(128, 2, 1, 7, 2, 178, "separate"),
    WarpgroupTile(96, 2, 1, 3, 4, 194, "shared"),
    WarpgroupTile(96, 2, 1, 2, 6, 82, "shared"),
    WarpgroupTile(96, 2, 1, 2, 6, 82, "shared", is_tiled=True),
    WarpgroupTile(96, 2, 1, 2, 6, 66, "separate", is_tiled=True, resident_steps=12),
    WarpgroupTile(192, 2, 1, 2, 5, 66, "separate", is_tiled=True),
    WarpgroupTile(64, 2, 1, 4, 4, 64, "shared", is_tiled=True),
    WarpgroupTile(32, 2, 1, 4, 6, 64, "shared", is_tiled=True),
    WarpgroupTile(64, 1, 2, 7, 4, 162, "separate"),
)


def warpgroup_columns(params: ProjectionParams) -> int:
    """Columns of the tiles that a layer's weights are packed for on sm_90a; 0: none.

    The convolutions of the decoder's blocks have wide tiles. Those of one tap load and store more
    for each product, and are faster with narrow tiles. The first convolution and the layers of the
    upsampling stages have few rows, and narrower tiles; the layers with fewer columns than channels
    have the narrowest, or they would occupy few multiprocessors. Layers of one row for each frame
    have none.
    """
    two_planes, channels = params.input.num_planes == 2, params.output.num_channels
    if params.input.rows_per_frame == 1:
        return 0
    if params.epilogue.value in (Epilogue.LINEAR, Epilogue.GELU):
        columns = 32 if params.num_columns < params.input.num_channels else 64
        return columns if params.num_columns % (2 * columns) == 0 else 0  # of both consumers
    if two_planes and params.num_taps > 2:
        return 64 if channels % 64 == 0 else 0
    if params.epilogue.value != Epilogue.SNAKE or channels % 96:
        return 0
    if params.num_taps == 2:
        few_frames = interleaved_frames(params.input.rows_per_frame) <= 2  # as its window has
        return 192 if channels in (192, 384) and few_frames else 96
    return {192: 192, 384: 128}.get(channels, 96) if params.num_taps > 2 else 96


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


def estimate_warpgroups_us(tile: WarpgroupTile, params: ProjectionParams, num_sms: int) -> float:
    """Estimated time of a launch, fitted to the times of bench.codec_tiles on an H200.

    Every round of a block has a prologue, the products of its steps, the copies of its windows, and
    an epilogue that reads and writes global memory. Copies in bulk take time before the first
    round, most of all those of resident weights.
    """
    num_channel_steps = params.input.num_channels // STEP_CHANNELS
    num_blocks, num_items = tile.num_blocks(params, num_sms), tile.num_items(params)
    column_tiles = params.num_columns // tile.columns if tile.resident_steps else 1
    value_bytes = 2 + 4 * bool(params.residual) + 4 * bool(params.residual_out)
    if tile.copies_stages:
        launch_us, prologue_us, copy_us = 0.5, 6.0, 0.041
    elif tile.resident_steps:
        launch_us, prologue_us, copy_us = 5.4, 3.3, 0.0
    elif tile.is_tiled:
        launch_us, prologue_us, copy_us = 1.8, 5.1, 0.0
    else:
        launch_us, prologue_us, copy_us = 2.0, 4.0, 0.16 if tile.warpgroups == 1 else 0.057

    def round_us(count: int) -> float:
        products = 5.7e-4 * count * tile.columns * params.num_taps * tile.planes * num_channel_steps
        row_tiles = 1 if tile.shares_rows else count
        copies = copy_us * row_tiles * tile.planes * num_channel_steps
        accesses = 1.27e-5 * WARPGROUP_ROWS * count * tile.columns * value_bytes
        if tile.resident_steps:  # the products of an item overlap the accesses of another
            return prologue_us + max(products, products / count + accesses)
        return prologue_us + products + copies + accesses

    items_of_tile, sharing_blocks = num_items // column_tiles, num_blocks // column_tiles
    return launch_us + sum_of_rounds(items_of_tile, tile.warpgroups, sharing_blocks, round_us)
