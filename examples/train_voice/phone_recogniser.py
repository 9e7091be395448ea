"""A recogniser of phones, whose features give a distance of what distinguishes phones.

It is trained beside the codec on the recordings' phones.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_voice.discriminators import Output
from examples.train_voice.phonemes import PHONES
from examples.train_voice.spectral import PHONE_BANDS, Spectra, soft_distance

_WIDTH, _KERNEL = 192, 5
_STRIDES = 2, 2, 2, 1, 1  # from 5 to 40 ms, half a frame


class PhoneRecogniser(nn.Module):
    """Convolutions over log-mels; each half frame sees 0.23 s on both sides."""

    def __init__(self, spectra: Spectra) -> None:
        super().__init__()
        self._spectra = spectra
        widths = PHONE_BANDS, *[_WIDTH] * len(_STRIDES)
        self._convs = nn.ModuleList(
            nn.Conv1d(into, out, _KERNEL, stride, _KERNEL // 2)
            for (into, out), stride in zip(pairwise(widths), _STRIDES, strict=True)
        )
        self._norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in _STRIDES)
        self._output = nn.Linear(_WIDTH, len(PHONES))

    def forward(self, wave: Tensor) -> Output:
        """Gives logits [batch, half frames, phones] of wave [batch, samples], and all features."""
        x = self._spectra.phone_mels(wave).mT
        features: list[Tensor] = []
        for conv, norm in zip(self._convs, self._norms, strict=True):
            y = F.gelu(norm(conv(x).mT)).mT
            x = x + y if x.shape == y.shape else y
            features.append(x)
        logits = self._output(x.mT)
        return logits, [*features, logits]

    def loss(self, wave: Tensor, phones: Tensor) -> Tensor:
        """Cross-entropy of the phones [batch, frames, 2] of wave [batch, samples]; -100 is none."""
        logits, _ = self(wave)
        return F.cross_entropy(logits.flatten(0, 1), phones.flatten(), ignore_index=-100)

    def distance(self, decoded: Tensor, target: Tensor) -> Tensor:
        """Distance of the features of two waveforms [batch, samples]: mean over layers.

        Differences are relative to the mean magnitude of the target's features.
        """
        with torch.no_grad():
            _, expected = self(target)
        _, found = self(decoded)
        pairs = zip(expected, found, strict=True)
        return torch.stack([soft_distance((e - f) / e.abs().mean()) for e, f in pairs]).mean()
