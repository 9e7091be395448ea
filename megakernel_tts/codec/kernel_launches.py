"""Launches of the codec's kernels for any number of frames."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megakernel_tts.kernels.codec import CodecKernels
from megakernel_tts.kernels.codec_structs import (
    Activations,
    ProjectionParams,
    ResidualUnitParams,
)

Launch = Callable[[int], None]  # of a number of frames


@dataclass(frozen=True)
class LayerLaunches:
    """A layer, or a residual unit, as kernel launches.

    Attributes:
        stage: The part of the network that it belongs to.
        separate: Its launches, one for each projection of a residual unit.
        fused: One launch with the same results.
        is_fused: Whether `fused` is launched for a number of frames.
    """

    stage: str
    separate: tuple[Launch, ...]
    fused: Launch | None = None
    is_fused: Callable[[int], bool] = lambda _: False

    def launches(self, num_frames: int) -> tuple[Launch, ...]:
        """The launches for a number of frames."""
        if self.fused is not None and self.is_fused(num_frames):
            return (self.fused,)
        return self.separate


@dataclass(frozen=True)
class ProjectionLaunch:
    """The launch of a projection.

    Attributes:
        params: The argument, except for the number of rows.
        rows_per_frame: Rows of the input.
        writes: Tensors that the kernel writes.
    """

    params: ProjectionParams
    rows_per_frame: int
    writes: list[Tensor]

    def params_of(self, num_frames: int) -> ProjectionParams:
        """The argument for a number of frames; the same object every time."""
        self.params.num_rows = num_frames * self.rows_per_frame
        return self.params


class ActivationLayouts:
    """The activations that are tiled in a call, see csrc/codec/params.cuh.

    Activations can be tiled if one projection reads them, and if the kernel that writes them can
    write them so. Kernels other than projections read only activations with a history, which no
    tile of tiled activations fits.
    """

    def __init__(self, kernels: CodecKernels) -> None:
        """Stores the kernels, whose tiles are chosen for each call."""
        self._kernels = kernels
        self._readers: dict[int, list[ProjectionLaunch]] = {}

    def add_reader(self, reader: ProjectionLaunch) -> None:
        """Adds a projection that reads activations."""
        self._readers.setdefault(reader.params.input.data.value, []).append(reader)

    def choose(self, output: Activations, num_frames: int, *, writes_tiles: bool) -> None:
        """Sets how a layer's output is stored, for its kernel and for the one that reads it.

        Args:
            output: Of the layer.
            num_frames: Frames of the call.
            writes_tiles: Whether the layer's kernel can write tiled activations.
        """
        readers = self._readers.get(output.data.value, [])
        if len(readers) != 1:
            return
        params = readers[0].params_of(num_frames)
        is_tiled = writes_tiles and self._kernels.is_tiled(params)
        output.is_tiled = params.input.is_tiled = is_tiled


@dataclass(frozen=True)
class ResidualUnitLaunch:
    """The launch of both projections of a residual unit as one kernel.

    Attributes:
        convolution: The convolution of several taps.
        pointwise: The one of one tap, which reads the output of the other.
        pointwise_weights: Address of the second weights for rows in registers; None: none fits.
        is_reversed: Whether the last rows come first.
        kernels: The compiled kernels.
    """

    convolution: ProjectionLaunch
    pointwise: ProjectionLaunch
    pointwise_weights: int | None
    is_reversed: bool
    kernels: CodecKernels

    def is_one_launch(self, num_frames: int) -> bool:
        """Whether one launch is estimated to take less time than two."""
        return self.kernels.unit_tile(self._params(num_frames)) is not None

    def launch(self, num_frames: int) -> None:
        """Launches the unit, for which there must be a tile."""
        params = self._params(num_frames)
        tile = self.kernels.unit_tile(params)
        assert tile is not None
        self.kernels.residual_unit(params, tile, self.pointwise.writes)

    def _params(self, num_frames: int) -> ResidualUnitParams:
        return ResidualUnitParams(
            self.convolution.params_of(num_frames),
            self.pointwise.params_of(num_frames),
            self.pointwise_weights,
            self.is_reversed,
        )
