"""Waveforms at the edge: files and arrays in, 16-bit PCM and wav files out."""

import io
import math
import os
import wave
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.errors import ReferenceAudioError

_LONGEST, _SHORTEST = 60.0, 0.5  # seconds of a reference recording
_SILENT = 1e-3  # peak below which a recording is called silent (-60 dBFS)
_CLIPPED = 1e-3  # share of samples in flat runs at the peak above which it is called clipped

Recording = str | os.PathLike[str] | BinaryIO | tuple[NDArray[np.floating], int]


def pcm16(wave: NDArray[np.float32]) -> NDArray[np.int16]:
    """[-1, 1] -> 16-bit samples, rounded to nearest."""
    scaled: NDArray[np.float32] = np.clip(wave, -1.0, 1.0) * np.float32(32767.0)
    return np.rint(scaled).astype(np.int16)


class WavWriter:
    """Writes a mono 16-bit wav file as the audio comes; the file is valid after every write."""

    def __init__(self, path: str | os.PathLike[str], sample_rate: int) -> None:
        self._file = open(path, "wb")
        self._wave = wave.open(self._file, "wb")
        self._wave.setnchannels(1)
        self._wave.setsampwidth(2)
        self._wave.setframerate(sample_rate)

    def write(self, pcm: NDArray[np.int16]) -> None:
        """Appends samples."""
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
    mono = samples.mean(axis=1) if samples.ndim == 2 else samples
    seconds = len(mono) / rate
    if len(mono) == 0:
        raise ReferenceAudioError(f"{name} is empty; a few seconds of clear speech are needed.")
    if not np.isfinite(mono).all():
        raise ReferenceAudioError(f"{name} holds samples that are no numbers (NaN or infinity).")
    _check_longest(name, seconds)
    if seconds < _SHORTEST:
        raise ReferenceAudioError(
            f"{name} lasts {seconds:.2f} s; at least {_SHORTEST} s are needed."
        )
    peak = float(np.abs(mono).max())
    if peak < _SILENT:
        raise ReferenceAudioError(f"{name} is silent (its peak is {_decibels(peak)}).")
    if _flat_share(mono, peak) > _CLIPPED:
        raise ReferenceAudioError(
            f"{name} is clipped: it stays flat at its peak of {_decibels(peak)}; record it at a "
            "lower level."
        )
    if rate != sample_rate:
        import soxr

        mono = soxr.resample(mono, rate, sample_rate, quality="HQ")
    return np.ascontiguousarray(mono, dtype=np.float32)


def _read(recording: Recording) -> tuple[str, NDArray[np.float32], int]:
    if isinstance(recording, tuple):
        samples = np.asarray(recording[0])
        if samples.ndim not in (1, 2) or not np.issubdtype(samples.dtype, np.floating):
            raise ReferenceAudioError(
                f"The reference audio must be floats [n] or [n, channels], found {samples.dtype} "
                f"of shape {samples.shape}."
            )
        if not 1000 <= recording[1] <= 768_000:
            raise ReferenceAudioError(f"The sample rate {recording[1]} is not one of a recording.")
        return "The reference audio", samples.astype(np.float32), int(recording[1])
    import soundfile

    path = Path(os.fspath(recording)) if isinstance(recording, str | os.PathLike) else None
    name = str(path) if path else "The reference audio"
    if path and not path.is_file():
        raise ReferenceAudioError(f"{name} does not exist or is no file.")
    source = str(path) if path else recording
    try:
        info = soundfile.info(source)
        _check_longest(name, info.frames / info.samplerate)  # before a huge file is read
        if isinstance(source, io.IOBase):
            source.seek(0)
        samples, rate = soundfile.read(source, dtype="float32")
    except ReferenceAudioError:
        raise
    except (soundfile.LibsndfileError, OSError, TypeError, ValueError) as error:
        raise ReferenceAudioError(f"{name} is not readable as audio ({error}).") from error
    return name, np.asarray(samples, dtype=np.float32), rate


def _check_longest(name: str, seconds: float) -> None:
    if seconds > _LONGEST:
        raise ReferenceAudioError(
            f"{name} lasts {seconds:.1f} s; cut it to {_LONGEST:.0f} s or less (5 to 15 s do best)."
        )


def _decibels(peak: float) -> str:
    return f"{20 * math.log10(peak):.0f} dBFS" if peak > 0 else "digital silence"


def _flat_share(mono: NDArray[np.float32], peak: float) -> float:
    """The share of samples that stand at the peak together with both of their neighbours."""
    top = np.abs(mono) >= 0.999 * peak
    return float((top[2:] & top[1:-1] & top[:-2]).mean()) if peak > 0.9 else 0.0
