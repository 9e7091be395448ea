import io
import struct
import tempfile
import tracemalloc
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from megakernel_tts import audio
from megakernel_tts.audio import (
    AUDIBLE,
    WavWriter,
    audible,
    pcm16,
    read_reference,
)
from megakernel_tts.errors import ReferenceAudioError


def speech(seconds: float = 2.0, rate: int = 24_000, level: float = 0.3) -> np.ndarray:
    t = np.arange(int(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * 220 * t) * np.sin(2 * np.pi * 3 * t)).astype(np.float32)


def test_pcm16_rounds_and_clips() -> None:
    out = pcm16(np.array([0.0, 1.0, -1.0, 2.0, 0.5 / 32767, 0.6 / 32767], np.float32))
    assert out.tolist() == [0, 32767, -32767, 32767, 0, 1]
    assert out.dtype == np.int16


def test_audible_compares_magnitude_with_threshold() -> None:
    levels = [0, AUDIBLE - 1, AUDIBLE, 32767, 1 - AUDIBLE, -AUDIBLE, -32768]
    pcm = np.array([levels, levels[::-1]], np.int16)
    assert audible(pcm)[0].tolist() == [abs(level) >= AUDIBLE for level in levels]
    np.testing.assert_array_equal(audible(pcm)[1], audible(pcm)[0][::-1])


def test_wav_file_is_valid_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    with WavWriter(path, 24_000) as writer:
        for n in (1, 2):
            writer.write(np.full(100, n, np.int16))
            with wave.open(io.BytesIO(path.read_bytes())) as written:
                assert written.getnframes() == 100 * n
    assert soundfile.read(path, dtype="int16")[0].tolist() == [1] * 100 + [2] * 100


def test_wav_writer_refuses_samples_before_the_header_overflows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struct.pack("<L", audio._MAX_WAV_BYTES + 36)
    with pytest.raises(struct.error):
        struct.pack("<L", audio._MAX_WAV_BYTES + 37)
    monkeypatch.setattr(audio, "_MAX_WAV_BYTES", 401)
    path = tmp_path / "a.wav"
    with WavWriter(path, 24_000) as writer:
        writer.write(np.full(150, 1, np.int16))
        with pytest.raises(ValueError, match=r"a\.wav is full: a wav file holds 4 GiB"):
            writer.write(np.full(51, 2, np.int16))
        writer.write(np.full(50, 3, np.int16))
    assert soundfile.read(path, dtype="int16")[0].tolist() == [1] * 150 + [3] * 50


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_recordings_are_mixed_down_and_resampled(tmp_path: Path, rate: int, channels: int) -> None:
    mono = speech(rate=rate)
    path = tmp_path / "a.wav"
    soundfile.write(path, np.stack([mono] * channels, axis=1), rate, subtype="FLOAT")
    read = read_reference(path, 24_000)
    assert abs(len(read) - 48_000) <= 1
    assert read.dtype == np.float32
    middle = slice(4800, 43_200)
    np.testing.assert_allclose(read[middle], speech()[middle], atol=2e-3)


def test_paths_files_and_arrays_give_the_same_samples(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, speech(), 24_000)
    expected = read_reference(path, 24_000)
    np.testing.assert_array_equal(read_reference(str(path), 24_000), expected)
    with path.open("rb") as file:
        np.testing.assert_array_equal(read_reference(file, 24_000), expected)
    np.testing.assert_array_equal(read_reference((expected, 24_000), 24_000), expected)


BAD: dict[str, tuple[Any, str]] = {
    "empty": ((np.zeros(0, np.float32), 24_000), "is empty"),
    "short": ((speech(0.2), 24_000), "lasts 0.20 s; at least"),
    "long": ((speech(61), 24_000), r"is longer than 60 s; cut it"),
    "silent": ((speech(level=0.0), 24_000), "is silent"),
    "faint": ((speech(level=1e-4), 24_000), "is silent"),
    "clipped": ((np.clip(20 * speech(), -1, 1), 24_000), "is clipped"),
    "nan": ((np.full(24_000, np.nan, np.float32), 24_000), "NaN or infinite"),
    "integers": ((np.zeros(24_000, np.int16), 24_000), "with floats"),
    "cube": ((np.zeros((2, 2, 2), np.float32), 24_000), "with floats"),
    "no rate": ((speech(),), "with floats"),
    "words": ((speech(), "24000"), "has the sample rate '24000'; it must be"),
    "scale": ((20_000 * speech(), 24_000), "out of scale"),
    "offset": ((np.full(48_000, 0.5, np.float32), 24_000), "is silent"),
    "click": ((np.eye(1, 48_000, 99, dtype=np.float32)[0], 24_000), "is silent"),
    "lowered": ((0.5 * np.clip(20 * speech(), -1, 1), 24_000), "is clipped"),
    "one side": (
        (np.stack([np.clip(20 * speech(), -1, 1), 0 * speech()], 1), 24_000),
        "is clipped",
    ),
    "nothing": (None, "not readable"),
    "rate": ((speech(), 0), "has the sample rate 0; it must be"),
    "no file": ("/nowhere/at/all.wav", "does not exist"),
    "ragged": (([[0.1, 0.2], [0.3]], 24_000), "they are no array"),
    "text": (("speech", 24_000), "with floats"),
    "no channels": ((np.zeros((24_000, 0), np.float32), 24_000), r"of shape \(24000, 0\)"),
    "no dimensions": ((np.float32(1), 24_000), r"of shape \(\)"),
    "low rate": ((speech(), 49), "has the sample rate 49; it must be"),
    "out of float32": ((np.full(24_000, 1e300), 24_000), "NaN or infinite"),
    "many channels": ((np.zeros((24_000, 1000), np.float32), 24_000), "convert it to one channel"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_recording_is_refused_with_reason(name: str) -> None:
    recording, message = BAD[name]
    with pytest.raises(ReferenceAudioError, match=message):
        read_reference(recording, 24_000)


def test_file_without_audio_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"RIFF\x00\x00", b"this is a text", bytes(1000)):
        path = tmp_path / "a.wav"
        path.write_bytes(content)
        with pytest.raises(ReferenceAudioError, match=r"a\.wav is not readable as audio"):
            read_reference(path, 24_000)
    with pytest.raises(ReferenceAudioError, match="is not a file"):
        read_reference(tmp_path, 24_000)


@pytest.mark.parametrize("rate", [1, 40, 49, 50, 999])
def test_file_with_a_low_sample_rate_is_refused(tmp_path: Path, rate: int) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, speech(2, 24_000), rate)
    with pytest.raises(ReferenceAudioError, match=f"a.wav has the sample rate {rate}; it must be"):
        read_reference(path, 24_000)


def test_size_of_a_decoded_file_is_bounded(tmp_path: Path) -> None:
    """Silence is compressed to thousandths, so a small file can be large in memory."""
    path, seconds, rate, num_channels = tmp_path / "a.flac", 8, 655_350, 8
    silence = np.zeros((rate, num_channels), np.int16)
    with soundfile.SoundFile(path, "w", rate, num_channels, format="FLAC") as file:
        for _ in range(seconds):
            file.write(silence)
    decoded_bytes = 4 * seconds * rate * num_channels
    assert path.stat().st_size < decoded_bytes / 1000 and decoded_bytes > 150e6
    tracemalloc.start()
    try:
        with pytest.raises(ReferenceAudioError, match=r"more than 16,777,216 samples in its 8 cha"):
            read_reference(path, 24_000)
        assert tracemalloc.get_traced_memory()[1] < 80e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("rate", "num_channels"), [(24_000, 8), (96_000, 2)])
def test_usual_rates_and_channels_are_accepted_up_to_a_minute(
    tmp_path: Path, rate: int, num_channels: int
) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, np.stack([speech(60, rate)] * num_channels, axis=1), rate)
    assert len(read_reference(path, 24_000)) == 60 * 24_000


def test_loud_recording_without_clipping_is_accepted() -> None:
    assert len(read_reference((speech(level=1.0), 24_000), 24_000)) == 48_000
    tone = 0.95 * np.sin(2 * np.pi * 100 * np.arange(48_000) / 24_000)
    assert len(read_reference((tone.astype(np.float32), 24_000), 24_000)) == 48_000


def test_an_open_file_is_read_up_to_a_limit() -> None:
    class Endless(io.RawIOBase):
        num_read = 0

        def read(self, size: int = -1) -> bytes:
            assert size >= 0, "an endless file is read to its end"
            self.num_read += size
            return bytes(size)

    file = Endless()
    with pytest.raises(ReferenceAudioError, match="more than 129 MiB"):
        read_reference(file, 24_000)  # pyright: ignore[reportArgumentType]  # no BinaryIO
    assert file.num_read <= 130 << 20


def test_open_files_are_read_from_their_position(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, speech(), 24_000)
    expected = read_reference(path, 24_000)
    with tempfile.NamedTemporaryFile() as file:
        file.write(path.read_bytes())
        file.seek(0)
        np.testing.assert_array_equal(read_reference(file, 24_000), expected)  # type: ignore[arg-type]
    with_offset = io.BytesIO(b"junk" + path.read_bytes())
    with_offset.seek(4)
    np.testing.assert_array_equal(read_reference(with_offset, 24_000), expected)
