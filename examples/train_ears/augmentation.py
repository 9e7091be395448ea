"""Speech as microphones and telephones record it, on the device, for batches of static shapes.

In this order: speed, silence around the speech, a room, a microphone's frequency response, noise,
the telephone, and the level. Every recording draws its own conditions.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_voice.training import fused
from megakernel_stt.model.config import SAMPLE_RATE

_STEP = 1600  # samples, of which every size is a multiple
_FAST_FACTORS = (2, 3, 5)  # of a size whose Fourier transform is fast
_ROOM_S = 0.5  # of a room's impulse response
_BANDS = 12  # of a frequency response
_MU = 255.0  # of mu-law
_HARMONICS = (1, 2, 3, 5, 7)  # of hum
_PHONE_HZ = (300.0, 3400.0)
_LEVEL = 0.05  # of noise without speech
_FLOOR = 1e-5  # level of digital silence


@dataclass(frozen=True)
class Conditions:
    """How often and how much speech is changed.

    Attributes:
        speed: Lowest and highest speed; pitch and formants change with it.
        silence_s: Longest silence before and after the speech.
        room: Share in a room.
        response: Share with a random frequency response.
        noise: Share with noise, of a random colour.
        hum: Share with hum of 50 or 60 Hz.
        babble: Share with other recordings in the background.
        telephone: Share of 8 kHz band limit and mu-law.
        level_db: Lowest and highest gain; samples beyond full scale are clipped.
        empty: Share in which the speech is left out, and so is the text.
    """

    speed: tuple[float, float] = (1.0, 1.0)
    silence_s: float = 0.0
    room: float = 0.0
    response: float = 0.0
    noise: float = 0.0
    hum: float = 0.0
    babble: float = 0.0
    telephone: float = 0.0
    level_db: tuple[float, float] = (0.0, 0.0)
    empty: float = 0.0


CLEAN = Conditions()
TRAINING = Conditions(
    speed=(0.85, 1.15),
    silence_s=0.5,
    room=0.5,
    response=0.6,
    noise=0.65,
    hum=0.08,
    babble=0.15,
    telephone=0.15,
    level_db=(-20.0, 15.0),
    empty=0.03,
)


class Augmentation:
    """Draws conditions with torch's random state."""

    def __init__(self, conditions: Conditions, device: torch.device) -> None:
        self._conditions, self._device = conditions, device

    def longest(self, samples: int) -> int:
        """Samples that a recording of so many can have afterwards."""
        silence = 2 * self._conditions.silence_s * SAMPLE_RATE
        longest = samples / self._conditions.speed[0] + silence
        return _fast_size(longest)

    def __call__(
        self, wave: Tensor, starts: Tensor, samples: Tensor, most: int, changed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Changes recordings.

        Args:
            wave: [all samples] int16.
            starts: [batch] int64, first sample of each recording.
            samples: [batch] int64, its samples.
            most: Samples of the longest recording.
            changed: [batch], whether more than speed and silence of a recording is changed.

        Returns:
            [batch, longest(most)] float32, samples of each recording [batch], and which have
            speech [batch].
        """
        c = self._conditions
        with torch.autocast(self._device.type, enabled=False):
            played, lengths = self._played(wave, starts, samples, self.longest(most))
            has_speech = ~(self._chosen(len(starts), c.empty) & changed)
            speech = played * has_speech[:, None]
            level = _rms(speech, lengths)
            speech = self._filtered(speech)
            babble = self._babble(played, level) * has_speech[:, None]
            level = level.masked_fill(~has_speech, _LEVEL)
            noise = self._noise(played, level) + self._hum(played, level)
            x = speech + babble + noise
            x = self._telephone(x)
            gain = 10 ** (self._uniform(len(x), *c.level_db) / 20)
            inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
            x = torch.where(changed[:, None], (x * gain[:, None]).clamp(-1, 1), played)
            return x * inside, lengths, has_speech

    def _uniform(self, count: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, device=self._device)

    def _chosen(self, count: int, share: float) -> Tensor:
        return torch.rand(count, device=self._device) < share

    def _played(
        self, wave: Tensor, starts: Tensor, samples: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Recordings at their speed between silences, by cubic interpolation."""
        c, count = self._conditions, len(starts)
        speed = self._uniform(count, *c.speed)
        before, after = (
            (self._uniform(count, 0, c.silence_s) * SAMPLE_RATE).long() for _ in range(2)
        )
        lengths = before + (samples / speed).long() + after
        run = fused(_interpolated, self._device)
        return run(wave, starts, samples, before, speed, longest), lengths

    def _filtered(self, x: Tensor) -> Tensor:
        """In a room, by exponentially decaying noise, and by a smooth random response."""
        c, (count, size) = self._conditions, x.shape
        room = round(_ROOM_S * SAMPLE_RATE)
        decay_s = 0.1 * 7 ** torch.rand(count, 1, device=x.device)  # to -60 dB: 0.1 to 0.7 s
        time = torch.arange(1, room + 1, device=x.device) / SAMPLE_RATE
        tail = torch.randn(count, room, device=x.device) * torch.exp(-6.9 * time / decay_s)
        ratio = 10 ** (self._uniform(count, -15, 3) / 20) * self._chosen(count, c.room)
        tail = tail * (ratio / tail.square().sum(1).sqrt())[:, None]
        response = F.pad(tail, (1, 0))
        response[:, 0] = 1
        total = _fast_size(size + room)
        spectrum = torch.fft.rfft(x, total) * torch.fft.rfft(response, total)
        decibels = 4 * torch.randn(count, 1, _BANDS, device=x.device)
        decibels = decibels * self._chosen(count, c.response)[:, None, None]
        smooth = F.interpolate(decibels, spectrum.shape[1], mode="linear", align_corners=True)
        return torch.fft.irfft(spectrum * 10 ** (smooth[:, 0] / 20), total)[:, :size]

    def _noise(self, x: Tensor, level: Tensor) -> Tensor:
        """Noise between white and brown at 0 to 35 dB below the speech."""
        count, size = x.shape
        spectrum = torch.fft.rfft(torch.randn(count, size, device=x.device))
        frequency = torch.arange(spectrum.shape[1], device=x.device).clamp(min=20)
        slope = self._uniform(count, 0, 1)[:, None]
        noise = torch.fft.irfft(spectrum * (frequency / 20) ** -slope, size)
        return self._mixed(noise, level, self._conditions.noise, (0.0, 35.0))

    def _hum(self, x: Tensor, level: Tensor) -> Tensor:
        """Mains hum with harmonics."""
        count, size = x.shape
        hertz = 50.0 + 10.0 * self._chosen(count, 0.5)[:, None]
        weights = torch.rand(count, len(_HARMONICS), device=x.device)
        hum = fused(_hum_of, x.device)(hertz, weights, size)
        return self._mixed(hum, level, self._conditions.hum, (5.0, 30.0))

    def _babble(self, x: Tensor, level: Tensor) -> Tensor:
        """Three other recordings of the batch."""
        others = x.roll(1, 0) + x.roll(2, 0) + x.roll(3, 0)
        return self._mixed(others, level, self._conditions.babble, (8.0, 30.0))

    def _mixed(
        self, noise: Tensor, level: Tensor, share: float, ratio_db: tuple[float, float]
    ) -> Tensor:
        """Noise of a random level below the speech's, in a share of the recordings."""
        count = len(noise)
        wanted = level * 10 ** (-self._uniform(count, *ratio_db) / 20)
        own = noise.square().mean(1).sqrt().clamp(min=_FLOOR)
        return noise * (wanted / own * self._chosen(count, share))[:, None]

    def _telephone(self, x: Tensor) -> Tensor:
        """Band limit of 300 to 3400 Hz and mu-law, in a share of the recordings."""
        chosen = self._chosen(len(x), self._conditions.telephone)[:, None]
        hertz = torch.fft.rfftfreq(x.shape[1], 1 / SAMPLE_RATE, device=x.device)
        low, high = _PHONE_HZ
        passed = torch.sigmoid((hertz - low) / 30) * torch.sigmoid((high - hertz) / 60)
        limited = torch.fft.irfft(torch.fft.rfft(x) * passed, x.shape[1])
        return torch.where(chosen, fused(_mu_law, x.device)(limited), x)


def _fast_size(least: float) -> int:
    """Smallest multiple of `_STEP` with a fast Fourier transform that is not less than `least`."""
    steps = max(1, math.ceil(least / _STEP))
    while True:
        rest = steps
        for factor in _FAST_FACTORS:
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return _STEP * steps
        steps += 1


def _interpolated(
    wave: Tensor, starts: Tensor, samples: Tensor, before: Tensor, speed: Tensor, longest: int
) -> Tensor:
    """Recordings [batch, longest] at their speed after so many samples of silence."""
    time = (torch.arange(longest, device=wave.device) - before[:, None]) * speed[:, None]
    whole = time.floor()
    part, first = time - whole, whole.long()
    taps: list[Tensor] = []
    for k in (-1, 0, 1, 2):
        index = first + k
        unknown = (index < 0) | (index >= samples[:, None])
        at = (starts[:, None] + index).clamp(0, len(wave) - 1)
        taps.append((wave[at].float() / 32768).masked_fill(unknown, 0.0))
    a, b, c, d = taps
    slope, bend = 0.5 * (c - a), a - 2.5 * b + 2 * c - 0.5 * d
    cubic = 1.5 * (b - c) + 0.5 * (d - a)
    return ((cubic * part + bend) * part + slope) * part + b


def _hum_of(hertz: Tensor, weights: Tensor, size: int) -> Tensor:
    """Sums of harmonics [batch, size]; hertz: [batch, 1], weights: [batch, harmonics]."""
    time = torch.arange(size, device=hertz.device) / SAMPLE_RATE
    hum = torch.zeros_like(hertz * time)
    for index, harmonic in enumerate(_HARMONICS):
        weight = weights[:, index, None] / harmonic
        hum = hum + weight * torch.sin(2 * math.pi * harmonic * hertz * time)
    return hum


def _mu_law(x: Tensor) -> Tensor:
    """Encoded by mu-law and decoded."""
    x = x.clamp(-1, 1)
    coded = x.sign() * torch.log1p(_MU * x.abs()) / math.log1p(_MU)
    coded = torch.round(coded * 127) / 127
    return coded.sign() * torch.expm1(coded.abs() * math.log1p(_MU)) / _MU


def _rms(x: Tensor, lengths: Tensor) -> Tensor:
    return (x.square().sum(1) / lengths.clamp(min=1)).sqrt()


def masked(mels: Tensor, lengths: Tensor) -> Tensor:
    """SpecAugment: two bands of frequencies and four of time have the batch's mean.

    Args:
        mels: [batch, mel frames, bins].
        lengths: [batch] int64, mel frames of each recording.
    """
    batch, frames, bins = mels.shape
    device = mels.device

    def bands(count: int, size: int, widest: Tensor, end: Tensor) -> Tensor:
        """[batch, size], whether an index is in one of `count` random bands."""
        width = torch.rand(batch, count, device=device) * widest[:, None]
        first = torch.rand(batch, count, device=device) * (end[:, None] - width)
        index = torch.arange(size, device=device)[:, None]
        return ((index >= first[:, None]) & (index < (first + width)[:, None])).any(2)

    all_bins = torch.full((batch,), float(bins), device=device)
    time = bands(4, frames, (0.06 * lengths).clamp(max=40.0), lengths.float())
    frequency = bands(2, bins, all_bins / 4, all_bins)
    inside = (torch.arange(frames, device=device) < lengths[:, None])[..., None]
    mean = (mels * inside).sum() / (bins * inside.sum())
    return torch.where(time[:, :, None] | frequency[:, None], mean, mels)
