import io
import struct
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from megakernel_tts import audio
from megakernel_tts.audio import AUDIBLE, WavWriter, audible, pcm16, read_reference
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
    "words": ((speech(), "24000"), "sample rate of the reference audio is '24000'"),
    "scale": ((20_000 * speech(), 24_000), "out of scale"),
    "offset": ((np.full(48_000, 0.5, np.float32), 24_000), "is silent"),
    "click": ((np.eye(1, 48_000, 99, dtype=np.float32)[0], 24_000), "is silent"),
    "lowered": ((0.5 * np.clip(20 * speech(), -1, 1), 24_000), "is clipped"),
    "one side": (
        (np.stack([np.clip(20 * speech(), -1, 1), 0 * speech()], 1), 24_000),
        "is clipped",
    ),
    "nothing": (None, "not readable"),
    "rate": ((speech(), 0), "sample rate of the reference audio is 0"),
    "no file": ("/nowhere/at/all.wav", "does not exist"),
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


def test_loud_recording_without_clipping_is_accepted() -> None:
    assert len(read_reference((speech(level=1.0), 24_000), 24_000)) == 48_000
    tone = 0.95 * np.sin(2 * np.pi * 100 * np.arange(48_000) / 24_000)
    assert len(read_reference((tone.astype(np.float32), 24_000), 24_000)) == 48_000


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
