"""Launches of the codec's kernels for any number of frames."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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
        kernels: The compiled kernels.
    """

    params: ProjectionParams
    rows_per_frame: int
    writes: list[Tensor]
    kernels: CodecKernels

    @property
    def input(self) -> Activations:
        """See `ActivationReader`."""
        return self.params.input

    def reads_tiles(self, num_frames: int) -> bool:
        """See `ActivationReader`."""
        return self.kernels.is_tiled(self.params_of(num_frames))

    def params_of(self, num_frames: int) -> ProjectionParams:
        """The argument for a number of frames; the same object every time."""
        self.params.num_rows = num_frames * self.rows_per_frame
        return self.params


class ActivationReader(Protocol):
    """A layer that reads activations."""

    @property
    def input(self) -> Activations:
        """The activations, as its kernel reads them."""
        ...

    def reads_tiles(self, num_frames: int) -> bool:
        """Whether they should be tiled in a call of a number of frames."""
        ...


class ActivationLayouts:
    """The activations that are tiled in a call, see csrc/codec/params.cuh.

    Activations can be tiled if one layer reads them, and if the kernel that writes them can write
    them so. Beside this layer only the update of the state reads such activations.
    """

    def __init__(self) -> None:
        """Begins without layers."""
        self._readers: dict[int, list[ActivationReader]] = {}
        self._updated: dict[int, Activations] = {}

    def add_update(self, activations: Activations) -> None:
        """Adds activations as the update of the state reads them, after the other kernels."""
        self._updated[activations.data.value] = activations

    def add_reader(self, reader: ActivationReader) -> None:
        """Adds a layer that reads activations."""
        self._readers.setdefault(reader.input.data.value, []).append(reader)

    def choose(
        self,
        output: Activations,
        num_frames: int,
        *,
        writes_tiles: bool,
        reader: ActivationReader | None = None,
    ) -> None:
        """Sets how a layer's output is stored, for its kernel and for those that read it.

        Args:
            output: Of the layer.
            num_frames: Frames of the call.
            writes_tiles: Whether the layer's kernel can write tiled activations.
            reader: The layer that reads it before it is written again; by default the only one
                that was added.
        """
        if reader is None:
            readers = self._readers.get(output.data.value, [])
            if len(readers) != 1:
                return
            reader = readers[0]
        is_tiled = writes_tiles and reader.reads_tiles(num_frames)
        output.is_tiled = reader.input.is_tiled = is_tiled
        if output.data.value in self._updated:
            self._updated[output.data.value].is_tiled = is_tiled


@dataclass(frozen=True)
class ResidualUnitLaunch:
    """The launch of both projections of a residual unit as one kernel.

    Attributes:
        convolution: The convolution of several taps.
        pointwise: The one of one tap, which reads the output of the other.
        pointwise_weights: Address of the second weights for rows in registers; None: none fits.
        is_reversed: Whether the last rows come first.
        kernels: The compiled kernels.
        layouts: How the output is stored.
    """

    convolution: ProjectionLaunch
    pointwise: ProjectionLaunch
    pointwise_weights: int | None
    is_reversed: bool
    kernels: CodecKernels
    layouts: ActivationLayouts

    @property
    def input(self) -> Activations:
        """See `ActivationReader`."""
        return self.convolution.params.input

    def reads_tiles(self, num_frames: int) -> bool:
        """See `ActivationReader`: one launch can read tiled activations."""
        return self.is_one_launch(num_frames)

    def is_one_launch(self, num_frames: int) -> bool:
        """Whether one launch is estimated to take less time than two."""
        return self.kernels.unit_tile(self._params(num_frames)) is not None

    def launch(self, num_frames: int) -> None:
        """Launches the unit, for which there must be a tile."""
        self.layouts.choose(self.pointwise.params.output, num_frames, writes_tiles=True)
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
