"""Discriminators of waveforms: by periods (HiFi-GAN) and by complex spectra (EnCodec)."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_voice.spectral import Spectra

_PERIODS = 2, 3, 5, 7, 11
_SIZES = 2048, 1024, 512  # of the spectra
_SLOPE = 0.1  # of activations for negative values
_FIRST_SCORES = 0.1  # deviation of untrained scores
_GAIN = 10.0  # of waveforms, to unit variance: recordings have a level of 0.1
_FLOOR = 1e-2  # magnitude below which spectra are not compressed further
# Noise of -66 dBFS in all waveforms. Without it the networks distinguish digital from decoded
# silence, and the gradient there is a hundred times that of speech.
_NOISE = 5e-4

Output = tuple[Tensor, list[Tensor]]  # scores, and the features of every layer


def _conv(
    into: int,
    out: int,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    deviation: float = 1.0,
) -> nn.Module:
    """A convolution whose output has a given deviation before the training.

    With torch's initial weights the signal vanishes, and the scores are biases.
    """
    padding = dilation[0] * (kernel[0] // 2), dilation[1] * (kernel[1] // 2)
    conv = nn.Conv2d(into, out, kernel, stride, padding, dilation)
    nn.init.normal_(
        conv.weight, 0, deviation * (2 / (1 + _SLOPE**2) / conv.weight[0].numel()) ** 0.5
    )
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return nn.utils.parametrizations.weight_norm(conv)


class _Network(nn.Module):
    """Convolutions over [batch, channels, time, periods or frequencies]."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self._layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Output:
        *layers, last = list(self._layers)
        features: list[Tensor] = []
        for layer in layers:
            x = F.leaky_relu(layer(x), _SLOPE)
            x = x.contiguous(memory_format=torch.channels_last)  # for tensor cores
            features.append(x)
        return last(x), features


def _period_network(channels: int) -> _Network:
    widths = (1, *(channels << i for i in range(5)))
    layers = [
        _conv(into, out, (5, 1), (3, 1) if i < 4 else (1, 1))
        for i, (into, out) in enumerate(pairwise(widths))
    ]
    return _Network([*layers, _conv(widths[-1], 1, (3, 1), deviation=_FIRST_SCORES)])


def _spectral_network(channels: int) -> _Network:
    strided = [_conv(channels, channels, (3, 9), (1, 2), (d, 1)) for d in (1, 2, 4)]
    return _Network(
        [
            _conv(2, channels, (3, 9)),
            *strided,
            _conv(channels, channels, (3, 3)),
            _conv(channels, 1, (3, 3), deviation=_FIRST_SCORES),
        ]
    )


class Discriminators(nn.Module):
    """Classifies waveforms as recorded (1) or decoded (0)."""

    def __init__(self, spectra: Spectra, channels: int) -> None:
        super().__init__()
        self._spectra = spectra
        self._period_networks = nn.ModuleList(_period_network(channels) for _ in _PERIODS)
        self._spectral_networks = nn.ModuleList(_spectral_network(channels) for _ in _SIZES)

    def forward(self, wave: Tensor) -> list[Output]:
        """Gives the output of each network for wave [batch, samples], with noise."""
        outputs: list[Output] = []
        wave = wave + _NOISE * torch.randn_like(wave)
        for period, network in zip(_PERIODS, self._period_networks, strict=True):
            padded = F.pad(wave, (0, -wave.shape[1] % period))
            outputs.append(network(_GAIN * padded.unflatten(1, (-1, period))[:, None]))
        for size, network in zip(_SIZES, self._spectral_networks, strict=True):
            outputs.append(network(self._compressed(wave, size)))
        return outputs

    def _compressed(self, wave: Tensor, size: int) -> Tensor:
        """Complex spectra [batch, 2, frames, bins] whose magnitudes are square roots."""
        with torch.autocast(wave.device.type, enabled=False):
            x = self._spectra.transform(wave, size) / (size / 1024) ** 0.5
            power = x.square().sum(-2, keepdim=True)
            return (x * (power + _FLOOR**2) ** -0.25).transpose(1, 2)


def discriminator_loss(real: list[Output], fake: list[Output]) -> Tensor:
    """Least-squares loss of the discriminators, summed over them."""
    losses = [
        (1 - r.float()).square().mean() + f.float().square().mean()
        for (r, _), (f, _) in zip(real, fake, strict=True)
    ]
    return torch.stack(losses).sum()


def adversarial_loss(fake: list[Output]) -> Tensor:
    """Least-squares loss of the generator, summed over the discriminators."""
    return torch.stack([(1 - scores.float()).square().mean() for scores, _ in fake]).sum()


def feature_loss(real: list[Output], fake: list[Output]) -> Tensor:
    """Relative distance of features: mean over layers, summed over the discriminators."""
    losses: list[Tensor] = []
    for (_, expected), (_, found) in zip(real, fake, strict=True):
        for e, f in zip(expected, found, strict=True):
            target = e.detach().float()
            distance = (target - f.float()).abs().mean() / (target.abs().mean() + 1e-3)
            losses.append(distance / len(expected))
    return torch.stack(losses).sum()
