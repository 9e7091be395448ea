"""The tiles of residual units as one kernel, and the choice between one kernel and two."""

from collections.abc import Callable
from dataclasses import dataclass

from megakernel_tts.kernels.codec_structs import (
    STEP_CHANNELS,
    WARPGROUP_ROWS,
    ProjectionParams,
    ResidualUnitParams,
)
from megakernel_tts.kernels.codec_tiles import least_time_us
from megakernel_tts.kernels.codec_warpgroup_tiles import (
    COLUMN_PARAMS_BYTES,
    WarpgroupTile,
    sum_of_rounds,
)

_PART_COLUMNS = 96  # of the second product at a time
_NUM_K_SPLITS = 2  # of the second product


@dataclass(frozen=True)
class ResidualUnitTile:
    """A tile of a residual unit on sm_90a; `ResidualUnitTile` in csrc/codec/residual_unit.cuh.

    Attributes:
        columns: Columns of a thread block, all of the unit.
        warpgroups: Warpgroups that multiply, with 64 rows each.
        stage_steps: Taps of the first convolution.
        stages: Stages of rows in shared memory.
        window_rows: The most rows of a window.
        weight_steps: Steps of weights in shared memory.
        is_resident: Whether all weights of the unit are in shared memory.
    """

    columns: int
    warpgroups: int
    stage_steps: int
    stages: int
    window_rows: int
    weight_steps: int
    is_resident: bool

    @property
    def convolution(self) -> WarpgroupTile:
        """The tile of the first convolution, without weights that stay in shared memory."""
        return WarpgroupTile(
            self.columns,
            self.warpgroups,
            1,
            self.stage_steps,
            self.stages,
            self.window_rows,
            "separate",
        )

    @property
    def template_arguments(self) -> str:
        """Of the tile in C++."""
        is_resident = str(self.is_resident).lower()
        return (
            f"{self.columns}, {self.warpgroups}, {self.stage_steps}, {self.stages}, "
            f"{self.window_rows}, {self.weight_steps}, {is_resident}"
        )

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.convolution.threads

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: that of a `WarpgroupTile`, and the columns' parameters."""
        further_steps = self.weight_steps - self.stages * self.stage_steps
        further_stages = -(-further_steps // self.stage_steps)
        weights = further_steps * self.columns * 2 * STEP_CHANNELS
        params = 2 * self.columns * COLUMN_PARAMS_BYTES
        mbarriers = 8 * 2 * further_stages
        size = self.convolution.stage_bytes + weights + params + mbarriers
        return -(-size // 16) * 16

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return f"codec_residual_unit_{self.columns}_{self.warpgroups}"

    def num_items(self, num_rows: int) -> int:
        """Items of a launch, see `WarpgroupSchedule` in csrc/codec/warpgroup_tile.cuh."""
        return num_rows // WARPGROUP_ROWS

    @staticmethod
    def _num_steps(*projections: ProjectionParams) -> int:
        """Steps of K of projections."""
        return sum(p.num_taps * p.input.num_channels // STEP_CHANNELS for p in projections)

    def fits(self, params: ResidualUnitParams) -> bool:
        """Whether the weights of a unit are packed for the tile, and its windows of rows fit."""
        first, second = params.convolution, params.pointwise
        return bool(
            self.convolution.fits(first)
            and (not self.is_resident or self._num_steps(first, second) == self.weight_steps)
            and first.input.rows_per_frame % WARPGROUP_ROWS == 0
            and first.num_columns == first.output.num_channels == self.columns
            and second.num_columns == second.output.num_channels == self.columns
            and second.num_taps == 1
            and second.warpgroup_columns == _PART_COLUMNS
            and second.num_k_splits == _NUM_K_SPLITS
            and second.residual
            and not (first.residual or first.residual_out)
        )


RESIDUAL_UNIT_TILES = (
    ResidualUnitTile(96, 3, 7, 3, 122, 24, True),
    ResidualUnitTile(192, 2, 7, 2, 122, 14, False),
)


def fitting_unit_tiles(params: ResidualUnitParams) -> list[ResidualUnitTile]:
    """The tiles that the launch of a unit may have."""
    return [tile for tile in RESIDUAL_UNIT_TILES if tile.fits(params)]


def estimate_unit_us(tile: ResidualUnitTile, params: ResidualUnitParams, num_sms: int) -> float:
    """Estimated time of a launch, fitted to the times of bench.codec_tiles on an H200.

    Every round of a block has the products of both convolutions, the second epilogue's accesses to
    global memory, and a time that depends on the columns only.

    Args:
        tile: The tile.
        params: The launch.
        num_sms: Multiprocessors of the GPU.
    """
    first, second = params.convolution, params.pointwise
    num_steps = (first.num_taps * first.input.num_channels + tile.columns) // STEP_CHANNELS
    value_bytes = 2 * second.output.num_planes + 4 + 4 * bool(second.residual_out)
    num_bytes = WARPGROUP_ROWS * tile.columns * value_bytes

    def round_us(count: int) -> float:
        products = 6.4e-4 * count * tile.columns * num_steps  # 84 % of the peak
        return 1.0 + 0.03 * tile.columns + products + 1.6e-5 * count * num_bytes

    num_items = tile.num_items(first.num_rows)
    return 1.15 + sum_of_rounds(num_items, tile.warpgroups, num_sms, round_us)


def choose_unit_tile(params: ResidualUnitParams, num_sms: int) -> ResidualUnitTile | None:
    """The tile with the least estimated time.

    Args:
        params: The launch.
        num_sms: Multiprocessors of the GPU.

    Returns:
        The tile; None if two launches take less time by the estimate, or no tile fits.
    """
    projections = (params.convolution, params.pointwise)
    least_us = sum(least_time_us(p, num_sms) for p in projections)
    chosen = None
    for tile in fitting_unit_tiles(params):
        tile_us = estimate_unit_us(tile, params, num_sms)
        if tile_us < least_us:
            chosen, least_us = tile, tile_us
    return chosen


ChooseUnitTile = Callable[[ResidualUnitParams, int], ResidualUnitTile | None]
