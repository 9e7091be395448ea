"""Waveforms at the edge: files and arrays in, 16-bit PCM and wav files out."""

import io
import os
import wave
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.errors import ReferenceAudioError

_LARGEST_WAV = (1 << 32) - 1 - 36  # bytes of samples: the header's sizes have 32 bits
_LONGEST, _SHORTEST = 60.0, 0.5  # seconds of a reference recording
_SILENT = 3e-3  # root mean square below which 20 ms are silent (-50 dBFS)
_LEAST_SOUND = 0.3  # seconds that must not be silent
_CLIPPED = 2e-3  # share of samples in flat runs at the peak above which a channel is clipped

AUDIBLE = 200  # of 32767 (-44 dBFS): quieter samples are the codec's noise floor

Recording = str | os.PathLike[str] | BinaryIO | tuple[NDArray[np.floating], int]


def pcm16(wave: NDArray[np.float32]) -> NDArray[np.int16]:
    """[-1, 1] -> 16-bit samples, rounded to nearest."""
    scaled: NDArray[np.float32] = np.clip(wave, -1.0, 1.0) * np.float32(32767.0)
    return np.rint(scaled).astype(np.int16)


def audible(pcm: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Which samples can be heard: those above the codec's noise floor.

    Args:
        pcm: 16-bit samples, in any shape.

    Returns:
        Bools of that shape.
    """
    return (pcm >= AUDIBLE) | (pcm <= -AUDIBLE)


class WavWriter:
    """Writes a mono 16-bit wav file as the audio comes; the file is valid after every write."""

    def __init__(self, path: str | os.PathLike[str], sample_rate: int) -> None:
        self._file = open(path, "wb")
        self._wave = wave.open(self._file, "wb")
        self._wave.setnchannels(1)
        self._wave.setsampwidth(2)
        self._wave.setframerate(sample_rate)

    def write(self, pcm: NDArray[np.int16]) -> None:
        """Appends samples.

        Raises:
            ValueError: They do not fit; the file stays as it was.
        """
        if 2 * (self._wave.getnframes() + len(pcm)) > _LARGEST_WAV:
            raise ValueError(
                f"{self._file.name} is full: a wav file holds 4 GiB, about 24 hours; write the "
                "rest to another file, or raw PCM."
            )
        self._wave.writeframes(pcm.astype("<i2").tobytes())
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a file without samples is valid too."""
        self._wave.close()
        self._file.close()

    def __enter__(self) -> "WavWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_reference(recording: Recording, sample_rate: int) -> NDArray[np.float32]:
    """Reads a recording that a voice is to be made from.

    Args:
        recording: A path or open file that soundfile reads, or (samples, rate) with samples
            [n] or [n, channels].
        sample_rate: What to resample to (soxr, high quality).

    Returns:
        [samples], mono, float32.

    Raises:
        ReferenceAudioError: Unreadable, empty, too short or too long, silent or clipped.
    """
    name, samples, rate = _read(recording)
    seconds = len(samples) / rate
    if len(samples) == 0:
        raise ReferenceAudioError(f"{name} is empty; a few seconds of clear speech are needed.")
    if not np.isfinite(samples).all():
        raise ReferenceAudioError(f"{name} holds samples that are no numbers (NaN or infinity).")
    if seconds > _LONGEST:
        raise ReferenceAudioError(
            f"{name} lasts longer than {_LONGEST:.0f} s; cut it (5 to 15 s do best)."
        )
    if seconds < _SHORTEST:
        raise ReferenceAudioError(
            f"{name} lasts {seconds:.2f} s; at least {_SHORTEST} s are needed."
        )
    if np.abs(samples).max() > 4:
        raise ReferenceAudioError(f"{name} is out of scale: samples go from -1 to 1.")
    mono = samples.mean(axis=1)
    if _sounding(mono, rate) < _LEAST_SOUND:
        raise ReferenceAudioError(f"{name} is silent, or all but: there is nothing to hear in it.")
    if any(_flat_share(channel) > _CLIPPED for channel in samples.T):
        raise ReferenceAudioError(
            f"{name} is clipped: it stays flat at its peak; record it at a lower level."
        )
    if rate != sample_rate:
        import soxr

        mono = soxr.resample(mono, rate, sample_rate, quality="HQ")
    return np.ascontiguousarray(mono, dtype=np.float32)


def _read(recording: Recording) -> tuple[str, NDArray[np.float32], int]:
    """Name for messages, samples [n, channels] of at most a little over the longest, and rate."""
    if isinstance(recording, tuple):
        return _check_array(*recording) if len(recording) == 2 else _check_array(None, None)
    import soundfile

    name = "The reference audio"
    source: str | io.BytesIO
    try:
        if isinstance(recording, str | os.PathLike):
            source = name = os.fspath(recording)
            if not Path(source).is_file():
                raise ReferenceAudioError(f"{name[:200]} does not exist or is no file.")
        else:
            source = io.BytesIO(recording.read())
        with soundfile.SoundFile(source) as file:
            rate = file.samplerate
            # The header's length may be unknown or a lie: what counts is what can be read.
            samples = file.read(int(_LONGEST * rate) + 1, dtype="float32", always_2d=True)
    except ReferenceAudioError:
        raise
    except (soundfile.LibsndfileError, AttributeError, OSError, TypeError, ValueError) as error:
        raise ReferenceAudioError(f"{name[:200]} is not readable as audio ({error}).") from error
    return name, np.asarray(samples, dtype=np.float32), rate


def _check_array(samples: object, rate: object) -> tuple[str, NDArray[np.float32], int]:
    array = np.asarray(samples)
    if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.floating):
        raise ReferenceAudioError(
            "The reference audio must be (samples, rate) with floats [n] or [n, channels], found "
            f"{array.dtype} of shape {array.shape}."
        )
    if not isinstance(rate, int | np.integer) or not 1000 <= rate <= 768_000:
        raise ReferenceAudioError(f"The sample rate {rate!r} is not one of a recording.")
    longest = int(_LONGEST * rate) + 1
    columns = array[:longest] if array.ndim == 2 else array[:longest, None]
    return "The reference audio", columns.astype(np.float32), int(rate)


def _sounding(mono: NDArray[np.float32], rate: int) -> float:
    """Seconds that are not silent, a constant offset aside."""
    block = rate // 50
    whole = mono[: len(mono) // block * block].reshape(-1, block)
    loud = (whole - mono.mean()).std(axis=1) > _SILENT
    return float(loud.sum()) / 50


def _flat_share(channel: NDArray[np.float32]) -> float:
    """The share of samples that stand at the peak together with both of their neighbours."""
    top = np.abs(channel) >= (1 - 1e-4) * np.abs(channel).max()
    return float((top[2:] & top[1:-1] & top[:-2]).mean()) if channel.any() else 0.0
