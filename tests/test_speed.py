import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megakernel_tts import MegakernelTTSError, MissingExtraError, SpeedError, speed
from megakernel_tts.speed import TimeScaler, check_speed

RATE = 24_000
SPEEDS = (0.5, 0.7, 0.999, 1.2, 1.5, 2.0)
MAX_LAG_S = 0.09


def harmonics(pitch_hz: float, seconds: float) -> NDArray[np.int16]:
    """A voiced sound: a tone with overtones that become weaker."""
    times = np.arange(round(seconds * RATE)) / RATE
    wave = sum(np.sin(2 * np.pi * pitch_hz * n * times) / n for n in range(1, 15))
    return (8000 * wave / np.abs(wave).max()).astype(np.int16)


def pitch_of(pcm: NDArray[np.int16]) -> float:
    """The pitch in Hz: the period at which the samples resemble themselves most."""
    samples = pcm - pcm.mean()
    spectrum = np.fft.rfft(samples, 2 * len(samples))
    similarity = np.fft.irfft(np.abs(spectrum) ** 2)[: len(samples) // 2]
    first, last = RATE // 500, RATE // 60
    return RATE / (first + int(similarity[first:last].argmax()))


def scaled(pcm: NDArray[np.int16], factor: float, sizes: Iterator[int]) -> NDArray[np.int16]:
    """Samples at another speed, passed in portions of these sizes."""
    scaler, parts, start = TimeScaler(factor, RATE), [np.zeros(0, np.int16)], 0
    num_out = 0
    while start < len(pcm):
        stop = start + next(sizes)
        parts.append(scaler.push(pcm[start:stop]))
        start, num_out = min(stop, len(pcm)), num_out + len(parts[-1])
        assert 0 <= start - num_out * factor <= MAX_LAG_S * RATE + 480
    return np.concatenate([*parts, scaler.end()])


def frames() -> Iterator[int]:
    while True:
        yield 1920


@pytest.mark.parametrize("factor", SPEEDS)
@pytest.mark.parametrize("pitch_hz", [90.0, 143.0, 220.0, 317.0])
def test_the_pitch_is_constant(factor: float, pitch_hz: float) -> None:
    pcm = scaled(harmonics(pitch_hz, 1.5), factor, frames())
    middle = pcm[len(pcm) // 4 : -len(pcm) // 4]
    assert pitch_of(middle) == pytest.approx(pitch_of(harmonics(pitch_hz, 1.5)), rel=0.005)
    assert middle.std() == pytest.approx(harmonics(pitch_hz, 1.5).std(), rel=0.1)


@given(st.integers(0, 30_000), st.sampled_from(SPEEDS))
@settings(deadline=None, max_examples=40)
def test_the_duration_is_exact(num_samples: int, factor: float) -> None:
    pcm = scaled(harmonics(120.0, 1.3)[:num_samples], factor, frames())
    assert len(pcm) == round(num_samples / factor) and pcm.dtype == np.int16


@given(st.data(), st.sampled_from(SPEEDS))
@settings(deadline=None, max_examples=20)
def test_portions_do_not_change_samples(data: st.DataObject, factor: float) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    pcm = (harmonics(150.0, 1.0) * rng.uniform(0, 1, RATE)).astype(np.int16)
    whole = scaled(pcm, factor, iter([len(pcm)]))
    portions = scaled(pcm, factor, iter(lambda: int(rng.integers(1, 3000)), 0))
    np.testing.assert_array_equal(portions, whole)


@pytest.mark.parametrize("factor", SPEEDS)
def test_sounds_stay_in_place(factor: float) -> None:
    """Each of a series of sounds is, in its middle, where its time divided by the speed says."""
    starts_s, sound_s = np.arange(0.2, 6, 0.31), 0.12
    pcm = np.zeros(round(6.5 * RATE), np.int16)
    for i, start_s in enumerate(starts_s):
        sound = harmonics(100 + 20 * (i % 8), sound_s)
        pcm[round(start_s * RATE) :][: len(sound)] = sound
    energy = scaled(pcm, factor, frames()).astype(float) ** 2
    for start_s in starts_s:
        first, last = (round((start_s + s) / factor * RATE) for s in (-0.09, sound_s + 0.09))
        weights = energy[first:last]
        centre_s = (first + np.average(np.arange(len(weights)), weights=weights)) / RATE
        assert centre_s == pytest.approx((start_s + sound_s / 2) / factor, abs=0.03)


def test_silence_stays_silent() -> None:
    pcm = scaled(np.zeros(24_000, np.int16), 1.5, frames())
    assert len(pcm) == 16_000 and not pcm.any()


def test_scalers_start_no_thread() -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    if not Path("/proc/self/task").exists():
        pytest.skip("no list of threads")
    TimeScaler(1.5, RATE)
    before = num_threads()
    scalers = [TimeScaler(1.5, RATE) for _ in range(20)]
    assert scalers and num_threads() == before


@pytest.mark.parametrize("value", [0.49, 2.01, 0, -1, float("nan"), float("inf"), "1", None, True])
def test_other_speeds_are_refused(value: float) -> None:
    with pytest.raises(SpeedError, match=r"from 0\.5 to 2") as caught:
        check_speed(value)
    assert isinstance(caught.value, MegakernelTTSError)


def test_speed_one_needs_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "can_scale", lambda: False)
    check_speed(1)
    check_speed(1.0)
    with pytest.raises(MissingExtraError, match=r"megakernel-tts\[speed\]"):
        check_speed(1.5)
