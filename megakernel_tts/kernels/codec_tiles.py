"""The tiles of the codec's projection kernels, and the choice between them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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

    def num_blocks(self, num_rows: int, num_columns: int) -> int:
        """Thread blocks of a launch."""
        return -(-num_rows // self.rows) * (num_columns // self.columns)


# (Splits of K, planes) -> groups of rows and of columns of the tiles; of equal estimates the first
# one is chosen. Only sizes that some GPU would choose for the released codec, and for two planes
# those of one group of columns: the last convolution has no more.
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

    def num_blocks(self, num_rows: int, num_columns: int) -> int:
        """Thread blocks of a launch."""
        return -(-num_rows // self.rows) * (num_columns // self.columns)

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
        (2, 1, 8, 2),
    )
)


@dataclass(frozen=True)
class WarpgroupTile:
    """A tile of the projection kernel of sm_90a; `WarpgroupTile` in csrc/codec/warpgroup_rows.cuh.

    Attributes:
        columns: Columns of a thread block.
        warpgroups: Warpgroups that multiply, with 64 rows each.
        planes: Planes of the input.
        stages: Steps of weights in shared memory.
        windows: Windows of rows in shared memory, of a warpgroup.
        window_rows: The most rows of a window.
        is_resident: Whether all weights of a layer are in shared memory.
    """

    columns: int
    warpgroups: int
    planes: int
    stages: int
    windows: int
    window_rows: int
    is_resident: bool

    @property
    def has_residual(self) -> bool:
        """Whether the kernel reads and writes residuals."""
        return self.columns < 192

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block; one more warpgroup copies."""
        return WARPGROUP_THREADS * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: stages of weights, windows of rows, their addresses, mbarriers."""
        weights = self.stages * self.columns * 2 * STEP_CHANNELS
        windows = self.windows * self.planes * self.window_rows * 2 * STEP_CHANNELS
        addresses = 8 * self.window_rows
        mbarriers = 2 * 8 * (self.stages + self.warpgroups * self.windows)
        return weights + self.warpgroups * (windows + addresses) + mbarriers

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return f"codec_project_warpgroups_{self.columns}_{self.warpgroups}_{self.planes}"

    def num_blocks(self, num_rows: int, num_columns: int) -> int:
        """Tiles of a launch."""
        return -(-num_rows // self.rows) * (num_columns // self.columns)

    def fits(self, params: ProjectionParams) -> bool:
        """Whether the weights of a launch are packed for the tile, and its windows of rows fit."""
        num_frames = _max_frames(WARPGROUP_ROWS, params.input.rows_per_frame)
        window_rows = WARPGROUP_ROWS + num_frames * (params.num_taps - 1) * params.dilation
        num_steps = params.num_taps * params.input.num_channels // STEP_CHANNELS
        all_weights = params.num_columns == self.columns and num_steps <= self.stages
        return (
            self.planes == params.input.num_planes
            and self.columns == params.warpgroup_columns
            and window_rows <= self.window_rows
            and (all_weights or not self.is_resident)
            and (self.has_residual or not (params.residual or params.residual_out))
        )


# The last one is for layers of 96 channels.
WARPGROUP_TILES = tuple(
    WarpgroupTile(*sizes)
    for sizes in (
        (96, 2, 1, 14, 5, 172, False),
        (128, 2, 1, 10, 5, 172, False),
        (192, 2, 1, 8, 6, 118, False),
        (96, 2, 2, 10, 4, 160, False),
        (96, 3, 1, 21, 4, 118, True),
    )
)


def warpgroup_columns(params: ProjectionParams) -> int:
    """Columns of the tiles that a layer's weights are packed for on sm_90a; 0: none.

    The convolutions of the decoder's blocks: those of one tap load and store more for each product,
    and are faster with narrow tiles.
    """
    one_plane = params.input.num_planes == 1
    if params.epilogue.value != Epilogue.SNAKE or params.output.num_channels % 96:
        return 0
    if one_plane and params.num_taps > 1:
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
    """Estimated time of a launch, fitted to the times of bench.codec_tiles on an H100.

    The terms are launch and tail of every wave of blocks, and the loads of a multiprocessor through
    its first-level cache.
    """
    num_steps = params.num_taps * params.input.num_channels // STEP_CHANNELS
    num_blocks = tile.num_blocks(params.num_rows, params.num_columns)
    num_waves = -(-num_blocks // (tile.blocks_per_sm * num_sms))
    blocks_per_sm = -(-num_blocks // num_sms)
    groups = tile.row_groups * tile.planes + tile.column_groups
    return (
        num_waves * (1.0 + 1.2e-3 * tile.rows * tile.columns)
        + blocks_per_sm * 0.033 * num_steps / tile.k_splits * groups
    )


def _estimate_many_rows_us(tile: ManyRowTile, params: ProjectionParams, num_sms: int) -> float:
    """Estimated time of a launch of many rows, fitted in the same way.

    Every wave of blocks has a prologue, an epilogue that grows with the tile, and for each step the
    matrix instructions and the loads of a warp's operands. A block that is alone on its
    multiprocessor overlaps less.
    """
    num_steps = params.num_taps * params.input.num_channels // STEP_CHANNELS
    num_blocks = tile.num_blocks(params.num_rows, params.num_columns)
    num_waves = -(-num_blocks // (tile.blocks_per_sm * num_sms))
    products = tile.rows * tile.columns * (4.2e-4 + 1.6e-5 * tile.planes * num_steps)
    loads = 7e-3 * num_steps * (tile.row_groups * tile.planes + tile.column_groups)
    solo_factor = 1.07 if tile.blocks_per_sm == 1 else 1.0
    return solo_factor * num_waves * (7.0 + tile.blocks_per_sm * (products + loads))


def _estimate_warpgroups_us(tile: WarpgroupTile, params: ProjectionParams, num_sms: int) -> float:
    """Estimated time of a launch on sm_90a; the choice with it was fitted to measured times.

    Every tile of a block has a prologue, the products of its steps, and an epilogue that reads and
    writes global memory.
    """
    num_steps = params.num_taps * params.input.num_channels // STEP_CHANNELS
    num_tiles = -(-tile.num_blocks(params.num_rows, params.num_columns) // num_sms)
    products = 6.7e-4 * tile.warpgroups * tile.columns * tile.planes * num_steps
    value_bytes = 2 + 4 * bool(params.residual) + 4 * bool(params.residual_out)
    return 1.5 + num_tiles * (3.2 + products + 3.0e-5 * tile.rows * tile.columns * value_bytes)


AnyTile = Tile | ManyRowTile | WarpgroupTile


def fitting_tiles(params: ProjectionParams) -> list[AnyTile]:
    """The tiles that a launch may have."""
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


def choose_tile(params: ProjectionParams, num_sms: int) -> AnyTile:
    """The tile with the least estimated time.

    Args:
        params: The launch.
        num_sms: Multiprocessors of the GPU.
    """
    return min(fitting_tiles(params), key=lambda tile: _estimate_any_us(tile, params, num_sms))


def least_time_us(params: ProjectionParams, num_sms: int) -> float:
    """The estimated time of the tile that `choose_tile` returns."""
    return _estimate_any_us(choose_tile(params, num_sms), params, num_sms)


ChooseTile = Callable[[ProjectionParams, int], AnyTile]
