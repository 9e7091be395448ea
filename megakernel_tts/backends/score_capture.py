"""Copies the attention scores of captured heads from a launch to the host."""

import math

import torch
from torch import Tensor


class ScoreCapture:
    """The scores of a launch, on the device and in pinned memory of the host."""

    def __init__(self, scores: Tensor) -> None:
        """Allocates the memory of the host.

        Args:
            scores: float32 [streams, frames, captured heads, positions] on the device. A launch
                of fewer streams or frames writes its scores without gaps.
        """
        self._scores = scores
        self._num_heads, self._num_positions = scores.shape[2:]
        self._host = torch.zeros(scores.numel(), pin_memory=scores.is_cuda)

    @property
    def enabled(self) -> bool:
        """Whether any heads are captured."""
        return self._num_heads > 0

    def start_copy(self, num_streams: int, num_frames: int) -> None:
        """Copies a launch's scores behind it; does not wait.

        Args:
            num_streams: Streams of the launch.
            num_frames: Frames of each, at most.
        """
        count = num_streams * num_frames * self._num_heads * self._num_positions
        self._host[:count].copy_(self._scores.flatten()[:count], non_blocking=True)

    def rows(self, num_streams: int, num_frames: int) -> Tensor:
        """The copied scores [streams, frames, heads, positions]; valid until the next copy.

        Args:
            num_streams: Streams of the launch.
            num_frames: Frames of each, at most.
        """
        shape = (num_streams, num_frames, self._num_heads, self._num_positions)
        return self._host[: math.prod(shape)].view(shape)
