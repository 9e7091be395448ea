"""Distances between the spectra of waveforms at several resolutions."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_SIZES = (2048, 1024, 512, 256, 128)
_BANDS = {2048: 80, 1024: 80, 512: 40, 256: 20, 128: 10}  # of log-mels
_CODEC_SIZE, _CODEC_BANDS = 960, 40  # of log-mels with eight spectra per frame of the codec
_PHONE_SIZE, PHONE_BANDS = 480, 64  # of log-mels with 16 spectra per frame
_FLOOR = 0.05  # of magnitudes of 1,024 samples in logarithms: noise of -52 dBFS
_SMALL = 0.3  # difference below which `soft_distance` is quadratic
_MAGNITUDE_WEIGHT, _MEL_WEIGHT, _LINEAR_WEIGHT = 2.0, 4.0, 0.5
_PHASE_SIZES, _PHASE_TOP_HZ = (1024, 512), 1000
_PHASE_FLOOR = 0.1  # least magnitude in the distance of phases, relative to the recording's


def _mel_filters(size: int, mels: int) -> Tensor:
    """Triangular filters up to 12 kHz, [size / 2 + 1, mels]."""
    top = 2595 * math.log10(1 + 12_000 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, mels + 2) / 2595) - 1)
    bins = np.arange(size // 2 + 1)[:, None] * 24_000 / size
    rising = (bins - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - bins) / np.diff(edges)[1:]
    return torch.from_numpy(np.maximum(0, np.minimum(rising, falling))).float()


class Spectra:
    """Windowed Fourier transforms as matrix products, which a CUDA graph can capture."""

    def __init__(self, device: torch.device) -> None:
        self._bases: dict[int, Tensor] = {}
        self._filters: dict[int, Tensor] = {}
        others = {_CODEC_SIZE: _CODEC_BANDS, _PHONE_SIZE: PHONE_BANDS}
        for size, bands in (_BANDS | others).items():
            cycles = torch.outer(torch.arange(size), torch.arange(size // 2 + 1)) % size
            angles = 2 * math.pi / size * cycles.double()
            waves = torch.cat([angles.cos(), -angles.sin()], 1)
            window = torch.hann_window(size, dtype=torch.float64)[:, None]
            self._bases[size] = (window * waves).float().to(device)
            self._filters[size] = _mel_filters(size, bands).to(device)

    def transform(self, wave: Tensor, size: int) -> Tensor:
        """Real and imaginary parts [batch, windows, 2, size / 2 + 1]; the hop is size / 4."""
        hop = size // 4
        padded = F.pad(wave, (size // 2, size // 2 + -wave.shape[1] % hop))
        hops = padded.unflatten(1, (-1, hop))
        count = hops.shape[1] - 3
        windows = torch.cat([hops[:, i : i + count] for i in range(4)], -1)
        return (windows @ self._bases[size]).unflatten(-1, (2, -1))

    def magnitude(self, wave: Tensor, size: int) -> Tensor:
        """Magnitudes [batch, windows, size / 2 + 1]."""
        return (self.transform(wave, size).square().sum(-2) + 1e-8).sqrt()

    def log_mel(self, magnitude: Tensor, size: int) -> Tensor:
        """Log-mels [batch, windows, bands] of magnitudes."""
        return (magnitude @ self._filters[size]).clamp(min=1e-2).log()

    def codec_frame_mels(self, wave: Tensor) -> Tensor:
        """Eight log-mel spectra per frame of the codec: [batch, codec frames, 320]."""
        mels = self.log_mel(self.magnitude(wave, _CODEC_SIZE), _CODEC_SIZE)
        return mels[:, :-1].unflatten(1, (-1, 8)).flatten(2)

    def phone_mels(self, wave: Tensor) -> Tensor:
        """Log-mel spectra at steps of 5 ms: [batch, 16 * codec frames, 64]."""
        means = self._band_means(self.magnitude(wave, _PHONE_SIZE), _PHONE_SIZE)
        return (means[:, :-1] + _floor(_PHONE_SIZE)).log()

    def magnitude_distance(self, decoded: Tensor, target: Tensor) -> Tensor:
        """Mean distance of magnitudes, their logarithms and log-mels.

        Small differences of logarithms count little. Silence has no others, and with absolute
        differences its gradient is that of the floor's inverse: tens of times that of speech.
        """
        total = decoded.new_zeros(())
        for size in _SIZES:
            a = self.magnitude(decoded, size)
            with torch.no_grad():
                b = self.magnitude(target, size)
            total = total + _MAGNITUDE_WEIGHT * _log_distance(a, b, _floor(size))
            total = total + _LINEAR_WEIGHT * (a - b).abs().mean() / (b.mean() + 1e-3)
            if size >= 512:
                means = self._band_means(a, size), self._band_means(b, size)
                total = total + _MEL_WEIGHT * _log_distance(*means, _floor(size))
        return total

    def _band_means(self, magnitude: Tensor, size: int) -> Tensor:
        """Mean magnitude in each mel band."""
        return magnitude @ self._filters[size] / self._filters[size].sum(0)

    def phase_distance(self, decoded: Tensor, target: Tensor) -> Tensor:
        """Distance of phases up to 1 kHz: 0 if all are equal, about 2 if they are independent.

        The sum over two resolutions of 1 minus the cosine of the phase difference, weighted by the
        target's magnitude. It does not depend on decoded magnitudes above the floor: a distance of
        complex spectra makes sounds quieter whose phases the decoder does not know.
        """
        # Magnitudes alone are no reason to encode the phases that periodic speech needs.
        total = decoded.new_zeros(())
        for size in _PHASE_SIZES:
            bins = _PHASE_TOP_HZ * size // 24_000 + 1
            a = self.transform(decoded, size)[..., :bins]
            with torch.no_grad():
                b = self.transform(target, size)[..., :bins]
                weight = (b.square().sum(-2) + 1e-8).sqrt()
            # The gradient of a phase is the inverse of the magnitude: infinite at silence.
            magnitude = (a.square().sum(-2) + 1e-8).sqrt().maximum(_PHASE_FLOOR * weight)
            agreement = (a * b).sum(-2) / magnitude
            total = total + (weight - agreement).mean() / (weight.mean() + 1e-3)
        return total

    def mel_distance(self, decoded: Tensor, target: Tensor) -> Tensor:
        """The distance at 1,024 samples and 80 bands, as reported in the logs."""
        a, b = (self.log_mel(self.magnitude(x, 1024), 1024) for x in (decoded, target))
        return (a - b).abs().mean()


def _floor(size: int) -> float:
    """The floor for windows of a size: magnitudes of noise are proportional to its root."""
    return _FLOOR * (size / 1024) ** 0.5


def _log_distance(a: Tensor, b: Tensor, floor: float) -> Tensor:
    """Mean distance of the logarithms of values above a floor."""
    return soft_distance((a + floor).log() - (b + floor).log())


def soft_distance(difference: Tensor) -> Tensor:
    """Mean absolute difference, quadratic where it is small: silence has a small gradient, too."""
    return ((difference.square() + _SMALL**2).sqrt() - _SMALL).mean()
