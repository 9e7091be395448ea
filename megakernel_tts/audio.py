"""Input and output of waveforms: reference recordings, 16-bit PCM and wav files."""

import io
import os
import wave
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megakernel_common.files import check_output
from megakernel_tts.errors import ReferenceAudioError

_MAX_WAV_BYTES = (1 << 32) - 1 - 36  # of samples: the header's sizes have 32 bits
_MIN_SECONDS, _MAX_SECONDS = 0.5, 60.0  # of a reference recording
_MIN_RATE, _MAX_RATE = 1_000, 768_000  # of a reference recording, in Hz
_MAX_VALUES = 1 << 24  # samples of all channels of a reference recording: 64 MiB
_MAX_FILE_BYTES = 8 * _MAX_VALUES + (1 << 20)  # of an open file: float64 samples and a header
_MAX_SAMPLE = 4.0  # of a reference recording, whose full scale is 1
_SILENCE_RMS = 3e-3  # 20 ms with a lower root mean square are silent (-50 dBFS)
_MIN_SOUND_SECONDS = 0.3  # of a reference recording that must not be silent
_MAX_FLAT_SHARE = 2e-3  # of samples in flat runs at the peak; more is clipping

AUDIBLE = 200  # of 32767 (-44 dBFS): quieter samples are the codec's noise floor

Recording = str | os.PathLike[str] | BinaryIO | tuple[NDArray[np.floating], int]


def pcm16(wave: NDArray[np.float32]) -> NDArray[np.int16]:
    """Converts float samples in [-1, 1] to 16-bit samples, rounded to nearest."""
    scaled: NDArray[np.float32] = np.clip(wave, -1.0, 1.0) * np.float32(32767.0)
    return np.rint(scaled).astype(np.int16)


def audible(pcm: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Marks the samples above the codec's noise floor.

    Args:
        pcm: 16-bit samples, in any shape.

    Returns:
        Bools of the same shape.
    """
    return (pcm >= AUDIBLE) | (pcm <= -AUDIBLE)


class WavWriter:
    """Writes a mono 16-bit wav file incrementally; the file is valid after every write."""

    def __init__(self, path: str | os.PathLike[str], sample_rate: int) -> None:
        """Creates the file, or empties it.

        Args:
            path: A regular file or a new one.
            sample_rate: In Hz.

        Raises:
            OSError: See `check_output`; or the file cannot be opened.
        """
        check_output(Path(path))
        self._file = open(path, "wb")
        self._wave = wave.open(self._file, "wb")
        self._wave.setnchannels(1)
        self._wave.setsampwidth(2)
        self._wave.setframerate(sample_rate)

    def write(self, pcm: NDArray[np.int16]) -> None:
        """Appends samples.

        Raises:
            ValueError: They exceed the size of a wav file; the file is unchanged.
        """
        if 2 * (self._wave.getnframes() + len(pcm)) > _MAX_WAV_BYTES:
            raise ValueError(
                f"{self._file.name} is full: a wav file holds 4 GiB, about 24 hours; write the "
                "rest to another file, or raw PCM."
            )
        self._wave.writeframes(pcm.astype("<i2").tobytes())
        self._file.flush()

    def close(self) -> None:
        """Closes the file. A file without samples is valid."""
        self._wave.close()
        self._file.close()

    def __enter__(self) -> "WavWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_reference(recording: Recording, sample_rate: int) -> NDArray[np.float32]:
    """Reads a recording from which a voice is cloned.

    Args:
        recording: A path or open file that soundfile reads, or (samples, rate) with samples
            [n] or [n, channels].
        sample_rate: Of the result in Hz (soxr resamples with high quality).

    Returns:
        [samples], mono, float32.

    Raises:
        ReferenceAudioError: It is unreadable, empty, too short, too long, silent or clipped, or
            has too many channels for its sample rate.
    """
    name, samples, rate = _read(recording)
    seconds = len(samples) / rate
    if len(samples) == 0:
        raise ReferenceAudioError(f"{name} is empty; record a few seconds of clear speech.")
    if samples.size > _MAX_VALUES:
        raise ReferenceAudioError(
            f"{name} has more than {_MAX_VALUES:,} samples in its {samples.shape[1]} channels of "
            f"{rate:,} Hz; convert it to one channel of {sample_rate:,} Hz."
        )
    if not np.isfinite(samples).all():
        raise ReferenceAudioError(
            f"{name} has samples that are NaN or infinite; export the recording again."
        )
    if seconds > _MAX_SECONDS:
        raise ReferenceAudioError(
            f"{name} is longer than {_MAX_SECONDS:.0f} s; cut it (5 to 15 s work best)."
        )
    if seconds < _MIN_SECONDS:
        raise ReferenceAudioError(
            f"{name} lasts {seconds:.2f} s; at least {_MIN_SECONDS} s are needed."
        )
    if max(samples.max(), -samples.min()) > _MAX_SAMPLE:
        raise ReferenceAudioError(f"{name} is out of scale; samples must be between -1 and 1.")
    mono = samples.mean(axis=1)
    if _sound_seconds(mono, rate) < _MIN_SOUND_SECONDS:
        raise ReferenceAudioError(
            f"{name} is silent or nearly silent; record it closer to the microphone."
        )
    if any(_flat_share(channel) > _MAX_FLAT_SHARE for channel in samples.T):
        raise ReferenceAudioError(
            f"{name} is clipped (flat at its peak); record it at a lower level."
        )
    if rate != sample_rate:
        import soxr

        mono = soxr.resample(mono, rate, sample_rate, quality="HQ")
    return np.ascontiguousarray(mono, dtype=np.float32)


def _read(recording: Recording) -> tuple[str, NDArray[np.float32], int]:
    """Reads a recording, at most one sample of each channel more than the maximum.

    Returns:
        Its name for messages, the samples [n, channels] and their rate in Hz.
    """
    if isinstance(recording, tuple):
        return _check_array(*recording) if len(recording) == 2 else _check_array(None, None)
    import soundfile

    name = "The reference audio"
    source: str | io.BytesIO
    try:
        if isinstance(recording, str | os.PathLike):
            source = name = os.fspath(recording)
            if not Path(source).is_file():
                raise ReferenceAudioError(f"{name[:200]} does not exist or is not a file.")
        else:
            encoded = recording.read(_MAX_FILE_BYTES + 1)
            if len(encoded) > _MAX_FILE_BYTES:
                raise ReferenceAudioError(
                    f"{name} has more than {_MAX_FILE_BYTES >> 20} MiB; give a shorter recording."
                )
            source = io.BytesIO(encoded)
        with soundfile.SoundFile(source) as file:
            rate = _check_rate(name, file.samplerate)
            # The length in the header may be missing or wrong, so the samples are counted.
            limit = _max_length(rate, file.channels) + 1
            samples = file.read(limit, dtype="float32", always_2d=True)
    except ReferenceAudioError:
        raise
    except (soundfile.SoundFileError, AttributeError, OSError, TypeError, ValueError) as error:
        raise ReferenceAudioError(f"{name[:200]} is not readable as audio ({error}).") from error
    return name, np.asarray(samples, dtype=np.float32), rate


def _check_array(samples: object, rate: object) -> tuple[str, NDArray[np.float32], int]:
    name = "The reference audio"
    expected = f"{name} must be (samples, rate) with floats [n] or [n, channels]"
    try:
        array = np.asarray(samples)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ReferenceAudioError(f"{expected}; they are no array ({error}).") from error
    channels = array[:, None] if array.ndim == 1 else array
    if channels.ndim != 2 or not channels.shape[1] or not np.issubdtype(array.dtype, np.floating):
        raise ReferenceAudioError(f"{expected}, found {array.dtype} of shape {array.shape}.")
    valid_rate = _check_rate(name, rate)
    limit = _max_length(valid_rate, channels.shape[1]) + 1
    with np.errstate(over="ignore"):  # infinity is refused later
        return name, channels[:limit].astype(np.float32), valid_rate


def _check_rate(name: str, rate: object) -> int:
    if not isinstance(rate, int | np.integer) or not _MIN_RATE <= rate <= _MAX_RATE:
        raise ReferenceAudioError(
            f"{name} has the sample rate {rate!r}; it must be a whole number from {_MIN_RATE:,} to "
            f"{_MAX_RATE:,} Hz."
        )
    return int(rate)


def _max_length(rate: int, num_channels: int) -> int:
    """The maximum length of a recording in samples of each channel."""
    return min(int(_MAX_SECONDS * rate), _MAX_VALUES // num_channels)


def _sound_seconds(mono: NDArray[np.float32], rate: int) -> float:
    """Seconds above the silence threshold, without the constant offset."""
    window = rate // 50
    windows = mono[: len(mono) // window * window].reshape(-1, window)
    loud = (windows - mono.mean()).std(axis=1) > _SILENCE_RMS
    return float(loud.sum()) / 50


def _flat_share(channel: NDArray[np.float32]) -> float:
    """The share of samples at the peak whose preceding and following samples are there too."""
    top = np.abs(channel) >= (1 - 1e-4) * np.abs(channel).max()
    return float((top[2:] & top[1:-1] & top[:-2]).mean()) if channel.any() else 0.0
