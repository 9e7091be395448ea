import numpy as np
import pytest
import soxr

from megakernel_tts.audio import AUDIBLE
from pipecat_service.audio import Resampler, Trimmer, silence

RATE = 24_000


@pytest.mark.parametrize("size", [7, 480, 1920, 100_000])
def test_silence_before_speech_is_dropped_except_for_a_lead(size: int) -> None:
    rng = np.random.default_rng(0)
    quiet = rng.integers(-AUDIBLE + 1, AUDIBLE, 5000).astype(np.int16)
    speech = rng.integers(-9000, 9000, 3000).astype(np.int16)
    speech[0] = 9000
    later = np.zeros(4000, np.int16)
    pcm = np.concatenate([quiet, speech, later])
    trimmer = Trimmer(RATE)
    out = np.concatenate([trimmer.trim(pcm[i : i + size]) for i in range(0, len(pcm), size)])
    np.testing.assert_array_equal(out, pcm[5000 - RATE // 200 :])


def test_nothing_but_silence_gives_nothing() -> None:
    trimmer = Trimmer(RATE)
    assert not any(len(trimmer.trim(np.zeros(1920, np.int16))) for _ in range(5))


@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000])
def test_a_stream_is_resampled_like_the_whole(rate: int) -> None:
    t = np.arange(RATE) / RATE
    pcm = (9000 * np.sin(2 * np.pi * 300 * t)).astype(np.int16)
    stream = Resampler(RATE, rate)
    parts = [stream.convert(pcm[i : i + 1920]) for i in range(0, len(pcm), 1920)]
    out = np.concatenate([*parts, stream.end()]).astype(int)
    whole = soxr.resample(pcm, RATE, rate, quality="HQ").astype(int)
    assert len(out) == len(whole) == rate
    assert np.abs(out - whole).max() <= 2  # dither


def test_audio_at_the_target_rate_is_unchanged() -> None:
    pcm = np.arange(100, dtype=np.int16)
    same = Resampler(RATE, RATE)
    assert same.convert(pcm) is pcm and len(same.end()) == 0


def test_silence_has_whole_samples() -> None:
    assert silence(0.02, 8000) == bytes(320)
