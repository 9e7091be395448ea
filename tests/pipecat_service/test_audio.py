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


def tone(num_samples: int) -> np.ndarray:
    return np.full(num_samples, 5000, np.int16)


def hush(num_samples: int) -> np.ndarray:
    return np.full(num_samples, AUDIBLE // 2, np.int16)


@pytest.mark.parametrize("size", [7, 480, 1920, 100_000])
@pytest.mark.parametrize(("before", "after"), [(4800, 2400), (300, 5000), (0, 0), (2000, 200)])
def test_silence_at_a_joint_is_limited(size: int, before: int, after: int) -> None:
    first = np.concatenate([tone(5000), hush(6000), tone(3000), hush(before)])
    second = np.concatenate([hush(after), tone(4000), hush(6000), tone(100), hush(5000)])
    trimmer = Trimmer(RATE)
    trimmer.trim(tone(1))
    trimmer.expect_joint()
    parts = [trimmer.trim(first[i : i + size]) for i in range(0, len(first), size)]
    trimmer.begin_segment()
    parts += [trimmer.trim(second[i : i + size]) for i in range(0, len(second), size)]
    parts.append(trimmer.end())
    kept = min(before, 960) + min(after, 960)  # 40 ms on either side
    expected = [first[: len(first) - before], hush(kept), second[after:]]
    np.testing.assert_array_equal(np.concatenate(parts), np.concatenate(expected))
    # Positions of samples that were kept, from the first one on.
    end, onset = 1 + len(first) - before, 1 + len(first) + after
    dropped = before + after - kept
    assert trimmer.output_position(end - 1) == end - 1
    assert trimmer.output_position(onset) == onset - dropped
    assert trimmer.output_position(onset + 9000) == onset + 9000 - dropped


def test_silence_within_speech_is_played_in_time_while_a_joint_is_expected() -> None:
    """What is held is played before the next sound of the same segment, or at the end."""
    trimmer = Trimmer(RATE)
    trimmer.expect_joint()
    sizes = [len(trimmer.trim(pcm)) for pcm in (tone(1920), hush(1920), hush(1920), tone(1920))]
    assert sizes == [1920, 960, 0, 960 + 1920 + 1920]
    assert len(trimmer.trim(hush(1920))) == 960 and len(trimmer.end()) == 960


def test_silence_that_is_kept_is_not_trimmed() -> None:
    trimmer = Trimmer(RATE)
    assert len(trimmer.keep(hush(4800))) == 4800
    assert len(trimmer.trim(np.concatenate([hush(1000), tone(10)]))) == 120 + 10
    assert trimmer.output_position(5800) == 4800 + 120


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
