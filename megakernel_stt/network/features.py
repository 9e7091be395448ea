"""Log-mel features, equal to those that the models were trained with.

A mel frame every 10 ms: a window of 25 ms, centred in a transform of 512 samples, after a
pre-emphasis. Samples before and after the recording are zero. Computed in float32.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megakernel_stt.model.config import HOP_SIZE, SAMPLE_RATE
from megakernel_stt.model.weights import Linear
from megakernel_stt.network.layers import apply

FFT_SIZE, _WINDOW_SIZE = 512, 400  # samples
PREEMPHASIS = 0.97
LOG_FLOOR = 2**-24
_STD_FLOOR = 1e-5
_REACH = _WINDOW_SIZE // 2  # samples after the centre of a mel frame that it depends on
_MARGIN = (FFT_SIZE - _WINDOW_SIZE) // 2
_BLOCK_SIZE = 1024  # mel frames of a recording that are computed together
PAST_SIZE = _REACH + 1  # samples before the centre; the pre-emphasis of the first takes one more


class LogMel:
    """Computes the features of several streams on one device."""

    def __init__(self, num_mels: int, device: torch.device) -> None:
        """Makes window and filters.

        Args:
            num_mels: Bins.
            device: Of the samples.
        """
        self._window = F.pad(hann_window(), (_MARGIN, _MARGIN)).to(device)
        self._filters = Linear(mel_filters(num_mels).to(device), None)

    def __call__(self, samples: Tensor, counts: Tensor) -> Tensor:
        """Computes adjacent mel frames of every stream.

        On a CPU a mel frame's bits do not depend on the others.

        Args:
            samples: [streams, samples_of(mel frames)] float32, from `PAST_SIZE` before the centre
                of the first mel frame on.
            counts: [streams] int64, samples before the recording's end. The others count as zero.

        Returns:
            [streams, mel frames, bins] float32.
        """
        index = torch.arange(1, samples.shape[1], device=samples.device)
        emphasised = samples[:, 1:] - PREEMPHASIS * samples[:, :-1]
        emphasised = emphasised.masked_fill(index >= counts[:, None], 0.0)
        windows = F.pad(emphasised, (_MARGIN, _MARGIN)).unfold(1, FFT_SIZE, HOP_SIZE)
        spectrum = torch.fft.rfft(windows * self._window)
        power = torch.view_as_real(spectrum).square().sum(-1)
        # One product for each mel frame on a CPU: the BLAS chooses the order of a sum by the rows.
        mels = apply(self._filters, power.flatten(0, 1)[:, None])
        return torch.log(mels + LOG_FLOOR).view(*power.shape[:2], -1)

    def recording(self, samples: NDArray[np.float32]) -> Tensor:
        """Computes all mel frames of a recording.

        Args:
            samples: [samples] float32 at 16 kHz.

        Returns:
            [mel frames, bins] float32.
        """
        num_mels, device = mels_of(len(samples)), self._window.device
        size = samples_of(num_mels)
        padded = np.pad(samples, (PAST_SIZE, size))[:size]
        end = PAST_SIZE + len(samples)
        blocks = [torch.empty(0, len(self._filters.weight), device=device)]
        for first in range(0, num_mels, _BLOCK_SIZE):
            start = first * HOP_SIZE
            block = padded[start:][: samples_of(_BLOCK_SIZE)]
            counts = torch.tensor([end - start], device=device)
            blocks.append(self(torch.from_numpy(block)[None].to(device), counts)[0])
        return torch.cat(blocks)


def hann_window() -> Tensor:
    """Weights [400] of the samples of a mel frame."""
    return torch.hann_window(_WINDOW_SIZE, periodic=False)


def samples_of(num_mels: int) -> int:
    """Samples that so many adjacent mel frames depend on."""
    return (num_mels - 1) * HOP_SIZE + _WINDOW_SIZE + 1


def mels_of(num_samples: int) -> int:
    """Mel frames of a whole recording."""
    return num_samples // HOP_SIZE


def complete_mels_of(num_samples: int) -> int:
    """Mel frames of a recording's first samples that later ones do not change."""
    return max((num_samples - _REACH) // HOP_SIZE + 1, 0)


def samples_until(num_mels: int) -> int:
    """Samples of a recording after which so many mel frames are complete."""
    return (num_mels - 1) * HOP_SIZE + _REACH


def normalized(mels: Tensor) -> Tensor:
    """Normalises every bin of a recording to mean 0 and deviation 1 (offline models).

    Args:
        mels: [mel frames, bins].
    """
    centred = mels - mels.mean(0, keepdim=True) if len(mels) else mels
    variance = centred.square().sum(0) / max(len(mels) - 1, 1)
    return centred / (variance.sqrt() + _STD_FLOOR)


def mel_filters(num_mels: int) -> Tensor:
    """Triangular filters of unit area, evenly spaced on Slaney's mel scale from 0 to 8 kHz.

    Args:
        num_mels: Number of filters.

    Returns:
        [mels, 257] float32.
    """
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), num_mels + 2))
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, FFT_SIZE // 2 + 1)
    slopes = edges[:, None] - frequencies
    widths = np.diff(edges)[:, None]
    rising, falling = -slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    area = (edges[2:] - edges[:-2])[:, None] / 2
    return torch.from_numpy((triangles / area).astype(np.float32))


# Slaney's scale is linear below 1 kHz (15 mels) and logarithmic above it.
_HERTZ_PER_MEL, _KNEE_HERTZ, _KNEE_MEL = 200 / 3, 1000.0, 15.0
_LOG_STEP = math.log(6.4) / 27


def _mel(hertz: float) -> float:
    """A frequency above the knee, in mel."""
    return _KNEE_MEL + math.log(hertz / _KNEE_HERTZ) / _LOG_STEP


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _KNEE_HERTZ * np.exp(_LOG_STEP * (mel - _KNEE_MEL))
    return np.where(mel >= _KNEE_MEL, above, _HERTZ_PER_MEL * mel)
