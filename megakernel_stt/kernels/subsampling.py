"""The kernels of features and subsampling, with the tables and weights that they read."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megakernel_common.kernels.addresses import device_address
from megakernel_stt.kernels.conformer_launcher import ConformerLauncher
from megakernel_stt.kernels.conformer_structs import (
    BLOCK_THREADS,
    FlattenParams,
    LogMelParams,
    Streams,
    SubsampleParams,
)
from megakernel_stt.model.config import HOP_SIZE
from megakernel_stt.network.encoder import EncoderState
from megakernel_stt.network.features import (
    FFT_SIZE,
    LOG_FLOOR,
    PREEMPHASIS,
    hann_window,
    mel_filters,
    samples_of,
)

if TYPE_CHECKING:
    from megakernel_stt.model import weights as trees


class KernelLogMel:
    """Computes features as `LogMel` does, in the type of the model."""

    def __init__(self, launcher: ConformerLauncher, num_mels: int) -> None:
        """Makes the tables.

        Args:
            launcher: Of the kernels.
            num_mels: Bins.
        """
        self._launcher = launcher
        device = launcher.device
        filters = mel_filters(num_mels)
        angles = torch.arange(FFT_SIZE // 2, dtype=torch.float64) * (-2 * math.pi / FFT_SIZE)
        used = filters > 0
        first = used.int().argmax(1)
        ranges = torch.stack([first, first + used.sum(1)], 1)
        self._filters = filters.to(device)
        self._window = hann_window().to(device)
        self._twiddles = torch.stack([angles.cos(), angles.sin()], 1).float().to(device)
        self._ranges = ranges.int().to(device)

    def __call__(self, samples: Tensor, counts: Tensor) -> Tensor:
        """Computes adjacent mel frames of every stream; see `LogMel`."""
        launcher, (num_streams, num_samples) = self._launcher, samples.shape
        num_mels = (num_samples - samples_of(1)) // HOP_SIZE + 1
        shape = num_streams, num_mels, len(self._filters)
        output = torch.empty(shape, dtype=launcher.dtype, device=launcher.device)
        params = LogMelParams(
            samples=self._address(samples, torch.float32, "samples"),
            counts=self._address(counts, torch.int64, "counts"),
            window=self._address(self._window, torch.float32, "window"),
            twiddles=self._address(self._twiddles, torch.float32, "twiddles"),
            filters=self._address(self._filters, torch.float32, "filters"),
            ranges=self._address(self._ranges, torch.int32, "ranges"),
            output=launcher.address(output, "output"),
            num_samples=num_samples,
            num_mels=num_mels,
            num_bins=len(self._filters),
            preemphasis=PREEMPHASIS,
            log_floor=LOG_FLOOR,
        )
        launcher.launch("log_mel", params, num_streams * num_mels, [output])
        return output

    def _address(self, tensor: Tensor, dtype: torch.dtype, name: str) -> int:
        return device_address(tensor, dtype, name, self._launcher.device)


class SubsamplingKernels:
    """Mel frames to encoder frames, but for the last projection."""

    def __init__(self, launcher: ConformerLauncher, weights: "trees.Subsampling") -> None:
        """Prepares the weights.

        Args:
            launcher: Of the kernels.
            weights: The tensors.
        """
        self._launcher, self._stages = launcher, weights.stages
        self._strided = [  # [nine taps, channels]
            stage.strided.weight.flatten(1).t().contiguous() for stage in weights.stages
        ]

    def run(self, mels: Tensor, streams: Streams, states: EncoderState) -> Tensor:
        """Subsamples a chunk; moves the last input of every stage, and the number of frames.

        Args:
            mels: [streams, mel frames, bins]; those outside of a recording do not matter.
            streams: Of the launch.
            states: By state slot.

        Returns:
            [streams, frames, channels * bins].
        """
        x = mels[..., None]
        lasts = (states.stage1, states.stage2, states.stage3)
        for index, (stage, last) in enumerate(zip(self._stages, lasts, strict=True)):
            x = self._convolve(index, x, streams, last)
            if stage.pointwise is not None:
                weight, rows = stage.pointwise.weight.flatten(1), x.flatten(0, 2)
                bias = stage.pointwise.bias
                y = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
                x = y.view(x.shape)
        return self._flatten(x, streams, states)

    def _convolve(self, index: int, x: Tensor, streams: Streams, last: Tensor) -> Tensor:
        """The strided convolution of a stage.

        Args:
            index: Of the stage.
            x: [streams, frames, bins, channels].
            streams: Of the launch.
            last: [state slots, bins, channels], changed in place.

        Returns:
            [streams, frames / 2, bins / 2 + 1, channels].
        """
        launcher, weights = self._launcher, self._strided[index]
        bias, num_channels = self._stages[index].strided.bias, weights.shape[1]
        num_streams, num_frames, num_bins = x.shape[:3]
        output = x.new_empty(num_streams, num_frames // 2, num_bins // 2 + 1, num_channels)
        params = SubsampleParams(
            streams=streams,
            input=launcher.address(x, "x"),
            weights=launcher.address(weights, "weights"),
            bias=0 if bias is None else launcher.address(bias, "bias"),
            last=launcher.address(last, "last"),
            slot_stride=last.stride(0),
            output=launcher.address(output, "output"),
            stage=index,
            num_rows=num_streams * (num_frames // 2),
            num_bins=num_bins,
            num_channels=num_channels,
        )
        kernel = "subsample" if index else "subsample_mels"
        launcher.launch(kernel, params, _num_blocks(output), [output, last])
        return output

    def _flatten(self, x: Tensor, streams: Streams, states: EncoderState) -> Tensor:
        """The frames [streams, frames, channels * bins] after the last stage, which returned x."""
        launcher, (num_streams, num_frames, num_bins, num_channels) = self._launcher, x.shape
        output = x.new_empty(num_streams, num_frames, num_channels * num_bins)
        params = FlattenParams(
            streams=streams,
            input=launcher.address(x, "x"),
            output=launcher.address(output, "output"),
            num_frames=device_address(
                states.num_frames, torch.int64, "num_frames", launcher.device
            ),
            num_rows=num_streams * num_frames,
            num_bins=num_bins,
            num_channels=num_channels,
        )
        launcher.launch("flatten", params, _num_blocks(output), [output, states.num_frames])
        return output


def _num_blocks(output: Tensor) -> int:
    """Thread blocks of a launch whose threads have sixteen bytes of the output each."""
    return -(-output.nbytes // (16 * BLOCK_THREADS))
