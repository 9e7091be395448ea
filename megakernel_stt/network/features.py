"""Log-mel features, equal to those that the models were trained with, whole or as audio arrives.

A mel frame every 10 ms: a window of 25 ms, centred in a transform of 512 samples, after a
pre-emphasis. Samples before and after the recording are zero. Computed in float32.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.layers import linear
from megakernel_stt.model.config import HOP_SIZE, SAMPLE_RATE

_FFT_SIZE, _WINDOW_SIZE = 512, 400  # samples
_PREEMPHASIS = 0.97
_LOG_FLOOR = 2**-24
_STD_FLOOR = 1e-5
_REACH = _WINDOW_SIZE // 2  # samples after the centre of a mel frame that it depends on
_MARGIN = (_FFT_SIZE - _WINDOW_SIZE) // 2
_WINDOW = F.pad(torch.hann_window(_WINDOW_SIZE, periodic=False), (_MARGIN, _MARGIN))


class MelStream:
    """The features of one recording, as its samples arrive.

    `add` stores samples, and `take_mel_frames` computes the mel frames of many streams together.
    """

    def __init__(self, filters: Tensor) -> None:
        """Begins a recording.

        Args:
            filters: See `mel_filters`.
        """
        self._filters = filters
        # From the first sample of the next mel frame on. Replaced, never changed in place.
        self._emphasised = np.zeros(_FFT_SIZE // 2, np.float32)
        self._last = np.zeros(1, np.float32)  # the last sample, for the pre-emphasis
        self._num_samples = 0
        self._num_mel_frames = 0

    @property
    def num_samples(self) -> int:
        """Samples so far."""
        return self._num_samples

    @property
    def num_ready(self) -> int:
        """Mel frames that later samples do not change and that were not taken yet."""
        num_complete = max((self._num_samples - _REACH) // HOP_SIZE + 1, 0)
        return num_complete - self._num_mel_frames

    def add(self, samples: NDArray[np.float32]) -> None:
        """Adds samples.

        Args:
            samples: [samples] float32 at 16 kHz, any number of them.
        """
        if not len(samples):
            return
        emphasised = samples.copy()
        emphasised[1:] -= _PREEMPHASIS * samples[:-1]
        emphasised[:1] -= _PREEMPHASIS * self._last
        self._emphasised = np.concatenate([self._emphasised, emphasised])
        self._last = samples[-1:].copy()
        self._num_samples += len(samples)

    def push(self, samples: NDArray[np.float32]) -> Tensor:
        """Adds samples and takes the mel frames that are ready, [mel frames, bins]."""
        self.add(samples)
        return take_mel_frames([self])[0]

    def rest(self) -> Tensor:
        """Returns the mel frames that remain if the recording ends here; the stream can continue.

        Returns:
            [mel frames, bins]; a recording of n samples has n // 160 mel frames in all.
        """
        count = self._num_samples // HOP_SIZE - self._num_mel_frames
        return _log_mels(self._windows(count), self._filters)

    def _windows(self, count: int) -> Tensor:
        """Samples of the next mel frames [count, 512].

        Missing samples are zero, or have no weight in the window.
        """
        if count <= 0:
            return torch.empty(0, _FFT_SIZE)
        samples = self._emphasised
        missing = (count - 1) * HOP_SIZE + _FFT_SIZE - len(samples)
        if missing > 0:
            samples = np.concatenate([samples, np.zeros(missing, np.float32)])
        return torch.from_numpy(samples).unfold(0, _FFT_SIZE, HOP_SIZE)[:count]

    def _take_windows(self) -> Tensor:
        """Moves behind the mel frames that are ready; gives their samples [mel frames, 512]."""
        count = self.num_ready
        windows = self._windows(count)
        self._emphasised = self._emphasised[count * HOP_SIZE :]
        self._num_mel_frames += count
        return windows


def take_mel_frames(streams: Sequence[MelStream]) -> list[Tensor]:
    """Computes the mel frames of several streams that are ready, and moves behind them.

    A mel frame's bits do not depend on the others, or on how its samples arrived.

    Args:
        streams: At least one, all with the same filters.

    Returns:
        [mel frames, bins] of every stream.
    """
    windows = [stream._take_windows() for stream in streams]
    mels = _log_mels(torch.cat(windows), streams[0]._filters)
    return list(mels.split([len(one) for one in windows]))


def _log_mels(windows: Tensor, filters: Tensor) -> Tensor:
    """Features [mel frames, bins] of samples [mel frames, 512]."""
    if not len(windows):
        return torch.empty(0, len(filters))
    spectrum = torch.fft.rfft(windows * _WINDOW)
    power = spectrum.real.square() + spectrum.imag.square()
    # One product for each mel frame: the BLAS chooses the order of a sum by the number of rows.
    mels = linear(power[:, None], filters)[:, 0]
    return torch.log(mels + _LOG_FLOOR)


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
