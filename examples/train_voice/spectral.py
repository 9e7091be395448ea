"""Distances between waveforms: spectra at several resolutions, and spectral discriminators."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SIZES = (2048, 1024, 512, 256, 128)


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
        self._filters: dict[tuple[int, int], Tensor] = {}
        for size in (*_SIZES, 960):
            cycles = torch.outer(torch.arange(size), torch.arange(size // 2 + 1)) % size
            angles = 2 * math.pi / size * cycles.double()
            waves = torch.cat([angles.cos(), -angles.sin()], 1)
            window = torch.hann_window(size, dtype=torch.float64)[:, None]
            self._bases[size] = (window * waves).float().to(device)
            for mels in (40, 80):
                self._filters[size, mels] = _mel_filters(size, mels).to(device)

    def transform(self, wave: Tensor, size: int) -> Tensor:
        """Real and imaginary parts [batch, frames, 2, size / 2 + 1]; the hop is a quarter frame."""
        hop = size // 4
        padded = F.pad(wave, (size // 2, size // 2 + -wave.shape[1] % hop))
        chunks = padded.unflatten(1, (-1, hop))
        count = chunks.shape[1] - 3
        frames = torch.cat([chunks[:, i : i + count] for i in range(4)], -1)
        return (frames @ self._bases[size]).unflatten(-1, (2, -1))

    def magnitude(self, wave: Tensor, size: int) -> Tensor:
        """Magnitudes [batch, frames, size / 2 + 1]."""
        return (self.transform(wave, size).square().sum(-2) + 1e-8).sqrt()

    def log_mel(self, magnitude: Tensor, size: int, mels: int) -> Tensor:
        """Log-mels [batch, frames, mels] of magnitudes."""
        return (magnitude @ self._filters[size, mels]).clamp(min=1e-2).log()

    def frame_mels(self, wave: Tensor) -> Tensor:
        """Eight log-mel spectra per frame of the codec: [batch, codec frames, 320]."""
        mels = self.log_mel(self.magnitude(wave, 960), 960, 40)
        return mels[:, :-1].unflatten(1, (-1, 8)).flatten(2)

    def distance(self, decoded: Tensor, target: Tensor) -> Tensor:
        """Mean distance of magnitudes, their logarithms and log-mels at all resolutions."""
        total = decoded.new_zeros(())
        for size in _SIZES:
            floor = 2e-2 * (size / 1024) ** 0.5
            a = self.magnitude(decoded, size)
            with torch.no_grad():
                b = self.magnitude(target, size)
            total = total + ((a + floor).log() - (b + floor).log()).abs().mean()
            total = total + 0.5 * (a - b).abs().mean() / (b.mean() + 1e-3)
            if size >= 512:
                mels = 40 if size == 512 else 80
                difference = self.log_mel(a, size, mels) - self.log_mel(b, size, mels)
                total = total + 1.5 * difference.abs().mean()
        return total

    def mel_distance(self, decoded: Tensor, target: Tensor) -> Tensor:
        """Mean absolute difference of log-mels, as reported in the logs."""
        a, b = (self.log_mel(self.magnitude(x, 1024), 1024, 80) for x in (decoded, target))
        return (a - b).abs().mean()


class Discriminator(nn.Module):
    """Classifies waveforms as recorded or decoded by their complex spectra."""

    def __init__(self, spectra: Spectra, channels: int) -> None:
        super().__init__()
        self._spectra = spectra
        self._sizes = (1024, 512, 256)

        def layer(into: int, out: int, *, stride: int = 1, dilation: int = 1, width: int = 9):
            conv = nn.Conv2d(
                into,
                out,
                (3, width),
                stride=(1, stride),
                dilation=(dilation, 1),
                padding=(dilation, width // 2),
            )
            return nn.utils.parametrizations.weight_norm(conv)

        self.networks = nn.ModuleList(
            nn.ModuleList(
                [
                    layer(2, channels),
                    *(layer(channels, channels, stride=2, dilation=d) for d in (1, 2, 4)),
                    layer(channels, channels, width=3),
                    layer(channels, 1, width=3),
                ]
            )
            for _ in self._sizes
        )

    def forward(self, wave: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Gives the scores of each network and the features of every layer."""
        scores: list[Tensor] = []
        features: list[Tensor] = []
        for size, network in zip(self._sizes, self.networks, strict=True):
            x = 4 * self._spectra.transform(wave, size).transpose(1, 2) / size**0.5
            *layers, last = list(network)  # pyright: ignore[reportArgumentType]
            for layer in layers:
                x = F.leaky_relu(layer(x), 0.2)
                features.append(x)
            scores.append(last(x))
        return scores, features
