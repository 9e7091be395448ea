"""Log-mel features, equal to those that the models were trained with, whole or as audio arrives.

A frame every 10 ms: a window of 25 ms, centred in a transform of 512 samples, after a pre-emphasis.
Samples before and after the recording are zero. Computed in float32.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.layers import linear
from megakernel_stt.model.config import HOP_SIZE, SAMPLE_RATE

_FFT_SIZE, _WINDOW_SIZE = 512, 400  # samples
_PREEMPHASIS = 0.97
_LOG_FLOOR = 2**-24
_STD_FLOOR = 1e-5
_REACH = _WINDOW_SIZE // 2  # samples after the centre of a frame that it depends on


class MelStream:
    """The features of one recording, as its samples arrive."""

    def __init__(self, filters: Tensor) -> None:
        """Begins a recording.

        Args:
            filters: See `mel_filters`.
        """
        self._filters = filters
        window = torch.hann_window(_WINDOW_SIZE, periodic=False)
        margin = (_FFT_SIZE - _WINDOW_SIZE) // 2
        self._window = torch.nn.functional.pad(window, (margin, margin))
        self._emphasised = torch.zeros(_FFT_SIZE // 2)  # from the first sample of the next frame
        self._last: Tensor | None = None  # the last sample [1], for the pre-emphasis
        self._num_samples = 0
        self._num_frames = 0

    @property
    def num_samples(self) -> int:
        """Samples so far."""
        return self._num_samples

    def push(self, samples: Tensor) -> Tensor:
        """Adds samples.

        Args:
            samples: [samples] float32 at 16 kHz, any number of them.

        Returns:
            [frames, mels], the frames that later samples do not change.
        """
        if not len(samples):
            return self._frames(0)
        before = samples[:1] * 0 if self._last is None else self._last
        shifted = torch.cat([before, samples[:-1]])
        self._emphasised = torch.cat([self._emphasised, samples - _PREEMPHASIS * shifted])
        self._last = samples[-1:]
        self._num_samples += len(samples)
        num_complete = max((self._num_samples - _REACH) // HOP_SIZE + 1, 0)
        frames = self._frames(num_complete - self._num_frames)
        self._emphasised = self._emphasised[len(frames) * HOP_SIZE :]
        self._num_frames += len(frames)
        return frames

    def rest(self) -> Tensor:
        """Returns the frames that remain if the recording ends here; the stream can continue.

        Returns:
            [frames, mels]; a recording of n samples has n // 160 frames in all.
        """
        return self._frames(self._num_samples // HOP_SIZE - self._num_frames)

    def _frames(self, count: int) -> Tensor:
        """Computes the next frames; missing samples are zero, or have no weight in the window."""
        if count <= 0:
            return torch.empty(0, len(self._filters))
        size = (count - 1) * HOP_SIZE + _FFT_SIZE
        samples = self._emphasised[:size]
        samples = torch.nn.functional.pad(samples, (0, size - len(samples)))
        spectrum = torch.fft.rfft(samples.unfold(0, _FFT_SIZE, HOP_SIZE) * self._window)
        power = torch.view_as_real(spectrum).square().sum(-1)
        # One product for each frame: its bits do not depend on how the audio arrived.
        mels = linear(power[:, None], self._filters)[:, 0]
        return torch.log(mels + _LOG_FLOOR)


def normalized(mels: Tensor) -> Tensor:
    """Normalises every bin of a recording to mean 0 and deviation 1 (offline models).

    Args:
        mels: [frames, bins].
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
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, _FFT_SIZE // 2 + 1)
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
