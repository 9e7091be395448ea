"""The speaker encoder of a Base checkpoint: ECAPA-TDNN (Desplanques et al., 2020)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.layers import exact_convolutions
from megakernel_tts.model.config import SpeakerConfig
from megakernel_tts.model.weights import Speaker, SpeakerBlock, Tdnn

SAMPLE_RATE = 24_000
_FFT, _HOP = 1024, 256


def mel_filters(mels: int) -> Tensor:
    """Slaney's triangular filters from 0 to 12 kHz with unit area, [mels, fft / 2 + 1]."""
    # Slaney's scale: 200/3 Hz per mel up to 1 kHz, then 27 mels per factor of 6.4.
    break_mel, step = 15.0, torch.log(torch.tensor(6.4, dtype=torch.float64)) / 27.0
    top = break_mel + torch.log(torch.tensor(12.0, dtype=torch.float64)) / step
    mel = torch.linspace(0.0, float(top), mels + 2, dtype=torch.float64)
    hertz = torch.where(
        mel < break_mel, mel * 200.0 / 3.0, 1000.0 * torch.exp(step * (mel - break_mel))
    )
    bins = torch.linspace(0.0, SAMPLE_RATE / 2, _FFT // 2 + 1, dtype=torch.float64)
    width = hertz.diff()
    ramps = hertz[:, None] - bins[None, :]
    rising = -ramps[:-2] / width[:-1, None]
    falling = ramps[2:] / width[1:, None]
    triangles = torch.minimum(rising, falling).clamp(min=0)
    return (triangles * (2.0 / (hertz[2:] - hertz[:-2]))[:, None]).float()


def log_mel(wave: Tensor, filters: Tensor) -> Tensor:
    """Log-mel spectrogram of a wave [samples] at 24 kHz: [mels, samples // hop]."""
    pad = (_FFT - _HOP) // 2
    padded = F.pad(wave[None].float(), (pad, pad), mode="reflect")
    window = torch.hann_window(_FFT, device=wave.device)
    spectrum = torch.stft(
        padded, _FFT, _HOP, window=window, center=False, return_complex=True, onesided=True
    )
    magnitude = torch.sqrt(torch.view_as_real(spectrum).square().sum(-1) + 1e-9)
    return torch.log((filters @ magnitude[0]).clamp(min=1e-5))


def _conv(conv: Tdnn, x: Tensor, dilation: int = 1) -> Tensor:
    pad = (conv.weight.shape[-1] - 1) * dilation // 2
    x = F.pad(x, (pad, pad), mode="reflect") if pad else x
    return F.conv1d(x, conv.weight, conv.bias, dilation=dilation)


def _tdnn(conv: Tdnn, x: Tensor, dilation: int = 1) -> Tensor:
    return F.relu(_conv(conv, x, dilation))


def _block(block: SpeakerBlock, x: Tensor, dilation: int, scale: int) -> Tensor:
    splits = list(_tdnn(block.tdnn1, x).chunk(scale, dim=1))
    for i, conv in enumerate(block.res2net, start=1):
        res_input = splits[i] if i == 1 else splits[i] + splits[i - 1]
        splits[i] = _tdnn(conv, res_input, dilation)
    y = _tdnn(block.tdnn2, torch.cat(splits, dim=1))
    gate = F.relu(_conv(block.squeeze, y.mean(dim=2, keepdim=True)))
    return x + y * torch.sigmoid(_conv(block.excite, gate))


def _statistics(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation over time, [batch, channels, 1]."""
    mean = (weight * x).sum(dim=2, keepdim=True)
    variance = (weight * (x - mean).square()).sum(dim=2, keepdim=True)
    return mean, variance.clamp(min=1e-12).sqrt()


class SpeakerEncoder:
    """Waveform to speaker embedding (x-vector).

    Attributes:
        config: The speaker encoder's configuration.
    """

    def __init__(self, weights: Speaker, config: SpeakerConfig) -> None:
        """Uses the weights as they are, on their device."""
        self.config = config
        self._w = weights
        self._filters = mel_filters(config.num_mels).to(weights.fc.weight.device)

    @torch.inference_mode()
    def embed(self, wave: Tensor) -> Tensor:
        """Computes the speaker embedding of a recording.

        Args:
            wave: [samples], float32 at 24 kHz.

        Returns:
            The embedding [dim] in the weights' dtype, not normalised.
        """
        wave = wave.to(self._w.fc.weight.device)
        with exact_convolutions(wave.device):
            return self._embed(wave)

    def _embed(self, wave: Tensor) -> Tensor:
        weights, config = self._w, self.config
        x = log_mel(wave, self._filters)[None].to(weights.fc.weight.dtype)
        x = _tdnn(weights.first, x, config.dilations[0])
        outputs: list[Tensor] = []
        for block, dilation in zip(weights.blocks, config.dilations[1:-1], strict=True):
            x = _block(block, x, dilation, config.res2net_scale)
            outputs.append(x)
        x = _tdnn(weights.aggregate, torch.cat(outputs, dim=1), config.dilations[-1])
        mean, deviation = _statistics(x, torch.full_like(x, 1.0 / x.shape[2]))
        context = torch.cat([x, mean.expand_as(x), deviation.expand_as(x)], dim=1)
        attention = _conv(
            weights.attention_conv, torch.tanh(_tdnn(weights.attention_tdnn, context))
        )
        pooled = torch.cat(_statistics(x, attention.softmax(dim=2)), dim=1)
        return _conv(weights.fc, pooled)[0, :, 0]
