"""The engine's log-mel features for batches of recordings in training."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_stt.model.config import HOP_SIZE
from megakernel_stt.network.features import mel_filters

_FFT_SIZE, _WINDOW_SIZE = 512, 400  # samples
_PREEMPHASIS = 0.97
_LOG_FLOOR = 2**-24


class LogMel:
    """Features as `megakernel_stt.network.features.LogMel` computes them for recordings."""

    def __init__(self, num_mels: int, device: torch.device) -> None:
        self._filters = mel_filters(num_mels).to(device)
        window = torch.hann_window(_WINDOW_SIZE, periodic=False, device=device)
        margin = (_FFT_SIZE - _WINDOW_SIZE) // 2
        self._window = F.pad(window, (margin, margin))

    def __call__(self, wave: Tensor, lengths: Tensor) -> Tensor:
        """Computes the features.

        Args:
            wave: [batch, samples] float32 at 16 kHz.
            lengths: [batch] int64, samples of each recording; those beyond it do not matter.

        Returns:
            [batch, samples // 160, mels] float32.
        """
        emphasised = torch.cat([wave[:, :1], wave[:, 1:] - _PREEMPHASIS * wave[:, :-1]], 1)
        outside = torch.arange(wave.shape[1], device=wave.device) >= lengths[:, None]
        emphasised = emphasised.masked_fill(outside, 0.0)
        padded = F.pad(emphasised, (_FFT_SIZE // 2, _FFT_SIZE // 2))
        windows = padded.unfold(1, _FFT_SIZE, HOP_SIZE)[:, : wave.shape[1] // HOP_SIZE]
        spectrum = torch.fft.rfft(windows * self._window)
        power = torch.view_as_real(spectrum).square().sum(-1)
        return torch.log(power @ self._filters.t() + _LOG_FLOOR)
