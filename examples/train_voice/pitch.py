"""Compares the intonation of two recordings of one text: log-F0 along a time alignment."""

import numpy as np
import soxr
from numpy.typing import NDArray

_RATE = 16_000
_HOP = 320  # samples, 20 ms
_WINDOW = 1024
_LOWEST_HZ, _HIGHEST_HZ = 60, 400
_VOICED = 0.75  # least normalised autocorrelation of a voiced frame
_QUIET = 0.03  # least level of a voiced frame relative to the loudest
_BANDS = 24


def frames_of(samples: NDArray[np.int16], rate: int) -> NDArray[np.float64]:
    """Windows [frames, samples] at 16 kHz."""
    wave = soxr.resample(samples.astype(np.float64) / 32768, rate, _RATE)
    wave = np.pad(wave, _WINDOW // 2)
    count = 1 + (len(wave) - _WINDOW) // _HOP
    return wave[np.arange(count)[:, None] * _HOP + np.arange(_WINDOW)]


def log_f0(frames: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of F0 in Hz for each frame, NaN where it is not voiced."""
    half = _WINDOW // 2
    first, last = _RATE // _HIGHEST_HZ, _RATE // _LOWEST_HZ
    centred = frames - frames.mean(1, keepdims=True)
    size = 2 * _WINDOW
    head = np.fft.rfft(centred[:, :half], size)
    whole = np.fft.rfft(centred, size)
    products = np.fft.irfft(head.conj() * whole, size)[:, : last + 2]
    energies = np.cumsum(np.pad(centred**2, ((0, 0), (1, 0))), 1)
    lags = np.arange(last + 2)
    shifted = energies[:, lags + half] - energies[:, lags]
    similar = products / np.sqrt(shifted * shifted[:, :1] + 1e-12)
    inside = similar[:, first : last + 1]
    peaks = (inside >= similar[:, first - 1 : last]) & (inside >= similar[:, first + 1 : last + 2])
    best = np.where(peaks, inside, 0).max(1, keepdims=True)
    # The shortest period that is nearly as good: longer ones are its multiples.
    lag = first + np.argmax(peaks & (inside >= 0.93 * best), 1)
    level = np.sqrt((frames**2).mean(1))
    voiced = (best[:, 0] > _VOICED) & (level > _QUIET * level.max())
    return np.where(voiced, np.log(_RATE / lag), np.nan)


def _spectrum(frames: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normalised log energies [frames, bands] in bands of equal width on a mel scale."""
    power = np.abs(np.fft.rfft(frames * np.hanning(_WINDOW))) ** 2
    mel = 2595 * np.log10(1 + np.fft.rfftfreq(_WINDOW, 1 / _RATE) / 700)
    band = np.minimum((mel / mel[-1] * _BANDS).astype(int), _BANDS - 1)
    energies = np.stack([power[:, band == b].sum(1) for b in range(_BANDS)], 1)
    logs = np.log(energies + 1e-6)
    return (logs - logs.mean(0)) / (logs.std(0) + 1e-6)


def align(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.int64]:
    """Pairs of frames [pairs, 2] on the path of least distance (dynamic time warping)."""
    a, b = _spectrum(one), _spectrum(other)
    distance = ((a[:, None] - b[None]) ** 2).sum(-1)
    total = np.full((len(a) + 1, len(b) + 1), np.inf)
    total[0, 0] = 0
    for diagonal in range(2, len(a) + len(b) + 1):
        i = np.arange(max(1, diagonal - len(b)), min(len(a), diagonal - 1) + 1)
        j = diagonal - i
        before = np.minimum(total[i - 1, j - 1], np.minimum(total[i - 1, j], total[i, j - 1]))
        total[i, j] = distance[i - 1, j - 1] + before
    i, j = len(a), len(b)
    path: list[tuple[int, int]] = []
    while i and j:
        path.append((i - 1, j - 1))
        steps = ((i - 1, j - 1), (i - 1, j), (i, j - 1))
        i, j = min(steps, key=lambda step: total[step])
    return np.array(path[::-1])


def compare(
    original: NDArray[np.int16], speech: NDArray[np.int16], rate: int
) -> tuple[float, float] | None:
    """Compares intonation.

    Args:
        original: The teacher's recording, int16 [samples].
        speech: The voice's speech of the same text.
        rate: Sample rate of both.

    Returns:
        Correlation of log-F0 and the ratio of its standard deviations, speech to original; None if
        less than 20 pairs of frames are voiced.
    """
    frames = frames_of(original, rate), frames_of(speech, rate)
    if min(map(len, frames)) < 2:
        return None
    pairs = align(*frames)
    first, second = (log_f0(f)[pairs[:, k]] for k, f in enumerate(frames))
    voiced = ~np.isnan(first) & ~np.isnan(second)
    x, y = first[voiced], second[voiced]
    if len(x) < 20 or x.std() < 1e-3 or y.std() < 1e-3:
        return None
    return float(np.corrcoef(x, y)[0, 1]), float(y.std() / x.std())
