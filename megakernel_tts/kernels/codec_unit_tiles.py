"""The tiles of residual units as one kernel, and the choice between one kernel and two."""

from collections.abc import Callable
from dataclasses import dataclass

from megakernel_tts.kernels.codec_structs import STEP_CHANNELS, ResidualUnitParams
from megakernel_tts.kernels.codec_tiles import WarpgroupTile, least_time_us

_PART_COLUMNS = 96  # of the second product at a time
_NUM_K_SPLITS = 2  # of the second product
_COLUMN_PARAMS_BYTES = 16
# Start and end of a launch. The estimates of projections are below their times by this or more.
_LAUNCH_US = 1.5


@dataclass(frozen=True)
class ResidualUnitTile:
    """A tile of a residual unit on sm_90a; `ResidualUnitTile` in csrc/codec/residual_unit.cuh.

    Attributes:
        columns: Columns of a thread block, all of the unit.
        warpgroups: Warpgroups that multiply, with 64 rows each.
        stages: Stages of weights in shared memory; one has a step of the first convolution.
        windows: Windows of rows in shared memory, of a warpgroup.
        window_rows: The most rows of a window.
        is_resident: Whether all weights of the unit are in shared memory.
    """

    columns: int
    warpgroups: int
    stages: int
    windows: int
    window_rows: int
    is_resident: bool

    @property
    def convolution(self) -> WarpgroupTile:
        """The tile of the first convolution, with the stages that it may fill."""
        stages = self.stages - self._pointwise_stages if self.is_resident else self.stages
        return WarpgroupTile(
            self.columns,
            self.warpgroups,
            1,
            stages,
            self.windows,
            self.window_rows,
            self.is_resident,
        )

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return self.convolution.rows

    @property
    def threads(self) -> int:
        """Threads of a block; one more warpgroup copies."""
        return self.convolution.threads

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: that of a `WarpgroupTile`, and the columns' parameters."""
        stage_bytes = self.columns * 2 * STEP_CHANNELS + 2 * 8  # with its mbarriers
        further = (self.stages - self.convolution.stages) * stage_bytes
        params = 2 * self.columns * _COLUMN_PARAMS_BYTES
        return self.convolution.shared_bytes + further + params

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return f"codec_residual_unit_{self.columns}_{self.warpgroups}"

    @property
    def _pointwise_stages(self) -> int:
        """Stages with the weights of the second convolution."""
        return self.columns // STEP_CHANNELS

    def num_blocks(self, num_rows: int) -> int:
        """Tiles of a launch."""
        return -(-num_rows // self.rows)

    def fits(self, params: ResidualUnitParams) -> bool:
        """Whether the weights of a unit are packed for the tile, and its windows of rows fit."""
        first, second = params.convolution, params.pointwise
        return bool(
            self.convolution.fits(first)
            and first.num_columns == first.output.num_channels == self.columns
            and second.num_columns == second.output.num_channels == self.columns
            and second.num_taps == 1
            and second.warpgroup_columns == _PART_COLUMNS
            and second.num_k_splits == _NUM_K_SPLITS
            and second.residual
            and not (first.residual or first.residual_out)
        )


RESIDUAL_UNIT_TILES = (
    ResidualUnitTile(96, 3, 24, 3, 118, True),
    ResidualUnitTile(192, 2, 10, 6, 118, False),
)


def fitting_unit_tiles(params: ResidualUnitParams) -> list[ResidualUnitTile]:
    """The tiles that the launch of a unit may have."""
    return [tile for tile in RESIDUAL_UNIT_TILES if tile.fits(params)]


def estimate_unit_us(tile: ResidualUnitTile, params: ResidualUnitParams, num_sms: int) -> float:
    """Estimated time of a launch, fitted to the times of bench.codec_tiles on an H200.

    Every tile of a block has the products of both convolutions, the second epilogue's accesses to
    global memory, and a constant time for the first loads and the snake between the products.

    Args:
        tile: The tile.
        params: The launch.
        num_sms: Multiprocessors of the GPU.
    """
    first, second = params.convolution, params.pointwise
    num_steps = (first.num_taps * first.input.num_channels + tile.columns) // STEP_CHANNELS
    num_tiles = -(-tile.num_blocks(first.num_rows) // num_sms)
    products = 7.7e-4 * tile.warpgroups * tile.columns * num_steps  # 70 % of the peak
    value_bytes = 2 * second.output.num_planes + 4 + 4 * bool(second.residual_out)
    accesses = 1.7e-5 * tile.rows * tile.columns * value_bytes
    return _LAUNCH_US + num_tiles * (5.9 + products + accesses)


def choose_unit_tile(params: ResidualUnitParams, num_sms: int) -> ResidualUnitTile | None:
    """The tile with the least estimated time.

    Args:
        params: The launch.
        num_sms: Multiprocessors of the GPU.

    Returns:
        The tile; None if two launches take less time by the estimate, or no tile fits.
    """
    projections = (params.convolution, params.pointwise)
    least_us = sum(_LAUNCH_US + least_time_us(p, num_sms) for p in projections)
    chosen = None
    for tile in fitting_unit_tiles(params):
        tile_us = estimate_unit_us(tile, params, num_sms)
        if tile_us < least_us:
            chosen, least_us = tile, tile_us
    return chosen


ChooseUnitTile = Callable[[ResidualUnitParams, int], ResidualUnitTile | None]
