"""Activations of the codec's layers, and the places of their histories in a slot."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megakernel_tts.kernels.codec_warpgroup_tiles import interleaved_frames


@dataclass(frozen=True)
class ActivationBuffer:
    """Activations of a layer and the place of their history in a slot.

    Attributes:
        data: float16 [rows, planes, channels], or tiled (`Activations` in csrc/codec/params.cuh).
        rows_per_frame: Rows of one frame.
        history_rows: Rows before the call's first that the next layer reads.
        offset: Of the history in a slot, in elements.
    """

    data: Tensor
    rows_per_frame: int
    history_rows: int = 0
    offset: int = 0

    @property
    def planes(self) -> int:
        """Planes of a row."""
        return self.data.shape[1]

    @property
    def channels(self) -> int:
        """Channels of a plane."""
        return self.data.shape[2]


class ActivationBuffers:
    """Allocates the activations of all layers.

    Attributes:
        with_history: Those with a history, in the order of the layers.
        history_size: Elements of a slot's histories.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Begins without activations.

        Args:
            capacity: Largest number of frames of a call.
            device: Of the activations.
        """
        self._capacity, self._device = capacity, device
        self.with_history: list[ActivationBuffer] = []
        self.history_size = 0

    def allocate(
        self, rows_per_frame: int, channels: int, planes: int, history_rows: int = 0
    ) -> ActivationBuffer:
        """Allocates the activations of a layer: whole tiles of rows of interleaved frames.

        Args:
            rows_per_frame: Rows of one frame.
            channels: Channels of a plane.
            planes: 1, or 2 with rounding errors in the second plane.
            history_rows: Rows before the call's first that the next layer reads.
        """
        num_frames = interleaved_frames(rows_per_frame)
        num_groups = -(-self._capacity // num_frames)
        shape = (num_groups * num_frames * rows_per_frame, planes, channels)
        data = torch.zeros(shape, dtype=torch.float16, device=self._device)
        activations = ActivationBuffer(data, rows_per_frame, history_rows, self.history_size)
        if history_rows:
            self.with_history.append(activations)
            self.history_size += history_rows * planes * channels
        return activations
