"""Packets, recordings that are small as files and large in memory, and what is no audio."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from megakernel_stt import AudioError
from megakernel_stt.audio import copy_pcm, full_scale, read_blocks

NUM_CHANNELS, SECONDS = 8, 5


def write_silence(file: Path, rate: int) -> None:
    silence = np.zeros((rate, NUM_CHANNELS), np.int16)
    with soundfile.SoundFile(file, "w", rate, NUM_CHANNELS, format="FLAC") as recording:
        for _ in range(SECONDS):
            recording.write(silence)
    assert file.stat().st_size < 4 * SECONDS * rate * NUM_CHANNELS / 1000


@contextmanager
def allocating_at_most(num_bytes: float) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def test_a_rate_out_of_range_is_refused_before_audio_is_decoded(tmp_path: Path) -> None:
    write_silence(tmp_path / "a.flac", 655_350)
    with (
        allocating_at_most(1e6),
        pytest.raises(AudioError, match=r"a\.flac: sample_rate is 655350"),
    ):
        next(read_blocks(tmp_path / "a.flac"))


def test_the_memory_for_a_recording_is_bounded(tmp_path: Path) -> None:
    rate = 352_800
    write_silence(tmp_path / "a.flac", rate)
    with allocating_at_most(25e6):  # two blocks of all channels, of 56e6 bytes in all
        num_samples = sum(len(block) for block, _ in read_blocks(tmp_path / "a.flac"))
    assert num_samples == SECONDS * rate


@pytest.mark.parametrize("rate", [1, 49, 3_999])
def test_a_file_with_a_low_rate_is_refused(tmp_path: Path, rate: int) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(8_000), rate)
    with pytest.raises(AudioError, match=rf"a\.wav: sample_rate is {rate}; it must be"):
        next(read_blocks(tmp_path / "a.wav"))


@pytest.mark.parametrize(
    "wav",
    [
        None,
        5,
        (),
        ([[0.1, 0.2], [0.3]], 16_000),
        (np.zeros((100, 0), np.float32), 16_000),
        (np.float32(1), 16_000),
        (np.zeros((2, 2, 2), np.float32), 16_000),
        (np.zeros(100, np.int64), 16_000),
        (np.full(100, np.nan), 16_000),
        (np.zeros(100), 0),
        (np.zeros(100), "16000"),
    ],
)
def test_what_is_no_audio_is_refused(wav: Any) -> None:
    with pytest.raises(AudioError):
        next(read_blocks(wav))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.asarray])
def test_16_bit_samples_are_scaled_exactly(kind: Callable[..., Any]) -> None:
    values = np.arange(-32768, 32768, dtype=np.int16)
    found = full_scale(copy_pcm(kind(values), 16_000))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values / 32768)


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_a_packet_is_not_changed_with_its_array(dtype: type[np.generic]) -> None:
    values = np.ones(20, dtype)
    copy = copy_pcm(values[::2], 16_000)
    values[:] = 0
    found = full_scale(copy)
    assert len(found) == 10 and found.all()
