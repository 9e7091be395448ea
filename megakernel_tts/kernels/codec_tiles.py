"""The tiles of the codec's projection kernels, and the choice between them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megakernel_tts.kernels.codec_structs import BLOCK_THREADS, STEP_CHANNELS, ProjectionParams
from megakernel_tts.kernels.codec_warpgroup_tiles import (
    WARPGROUP_TILES,
    WarpgroupTile,
    estimate_warpgroups_us,
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

    def num_blocks(self, params: ProjectionParams) -> int:
        """Thread blocks of a launch."""
        return -(-params.num_rows // self.rows) * (params.num_columns // self.columns)


# (Splits of K, planes) -> groups of rows and of columns of the tiles; of equal estimates the first
# one is chosen. Only sizes that some GPU would choose for the codec of the released size or of the
# demo voice.
_SIZES = {
    (2, 1): ((2, 1), (2, 2), (4, 4), (8, 4)),
    (4, 1): ((2, 2), (2, 4), (4, 4), (8, 4)),
    (8, 1): ((2, 2), (2, 4), (4, 4), (4, 6), (8, 4), (1, 1), (1, 2), (1, 4)),
    (2, 2): ((2, 2), (2, 4)),
    (4, 2): ((2, 4),),
    (8, 2): ((2, 4), (4, 4), (4, 6), (1, 1), (1, 2), (1, 4)),
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
        (4, 4, 4, 1),
        (4, 3, 4, 1),
        (4, 4, 2, 2),
    )
)


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

    The terms are launch and tail of every wave of blocks, the loads of a multiprocessor through its
    first-level cache, and the prologue of the next launch, which overlaps if half of the
    multiprocessors are free.
    """
    num_steps = params.num_taps * params.input.num_channels // STEP_CHANNELS
    num_blocks = tile.num_blocks(params)
    num_waves = -(-num_blocks // (tile.blocks_per_sm * num_sms))
    blocks_per_sm = -(-num_blocks // num_sms)
    groups = tile.row_groups * tile.planes + tile.column_groups
    return (
        num_waves * (1.1 + 1e-3 * tile.rows * tile.columns)
        + blocks_per_sm * 0.064 * num_steps / tile.k_splits * groups
        + 0.9 * (num_blocks > num_sms // 2)
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
        return estimate_warpgroups_us(tile, params, num_sms)
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


def choose_tiling(params: ProjectionParams, num_sms: int) -> bool:
    """Whether the input of a launch is tiled, because it is estimated to take less time then.

    Args:
        params: The launch.
        num_sms: Multiprocessors of the GPU.
    """
    fitting = all_fitting_tiles(params)
    best = min(fitting, key=lambda tile: _estimate_any_us(tile, params, num_sms))
    return reads_tiled_rows(best)


def least_time_us(params: ProjectionParams, num_sms: int) -> float:
    """The estimated time of a launch whose input is tiled if it takes less time then."""
    fitting = all_fitting_tiles(params)
    return min(_estimate_any_us(tile, params, num_sms) for tile in fitting)


ChooseTile = Callable[[ProjectionParams, int], AnyTile]
ChooseTiling = Callable[[ProjectionParams, int], bool]
