"""Audio in: packets of PCM and recordings, at any sampling rate, to 16 kHz float32."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megakernel_stt.errors import AudioError
from megakernel_stt.model.config import SAMPLE_RATE

Wav = str | os.PathLike[str] | BinaryIO | tuple[NDArray[np.generic], int]
Pcm = bytes | bytearray | memoryview | NDArray[np.generic]
Samples = bytes | NDArray[np.float32]  # 16-bit integers, or floats [samples] of full scale 1

_BYTES = bytes, bytearray, memoryview
_MIN_RATE, _MAX_RATE = 4_000, 384_000  # Hz
_BLOCK_S = 10.0  # of a recording, read at a time
_MAX_BLOCK_SAMPLES = 1 << 21  # of all channels: a small file may be large when it is decoded
_FULL_SCALE = np.float32(1 / 32768)  # of a 16-bit sample
_KEEPS_LOCK = 500  # elements of an operation for which NumPy keeps the interpreter lock
_MEMORY_S = 0.5  # of input; far longer than the resampler's filter


def copy_pcm(pcm: Pcm, sample_rate: int) -> Samples:
    """Checks a packet, and copies it unless it is immutable.

    Args:
        pcm: 16-bit samples as bytes (little-endian) or integers [samples], or floats [samples] of
            full scale 1.
        sample_rate: In Hz.

    Returns:
        Samples that the caller does not change; `full_scale` converts them.

    Raises:
        AudioError: It has another type or shape, or the rate is out of range.
    """
    _check_rate(sample_rate)
    if isinstance(pcm, _BYTES):
        data = bytes(pcm)
        if len(data) % 2:
            raise AudioError(f"pcm has {len(data)} bytes; 16-bit samples have an even number.")
        return data
    if not isinstance(pcm, np.ndarray) or pcm.ndim != 1:
        found = f"shape {pcm.shape}" if isinstance(pcm, np.ndarray) else type(pcm).__name__
        raise AudioError(f"pcm has {found}; give bytes or an array [samples] of one channel.")
    if pcm.dtype == np.int16:
        return pcm.tobytes()
    if not np.issubdtype(pcm.dtype, np.floating):
        raise AudioError(f"pcm has samples of {pcm.dtype}; give int16, or floats of full scale 1.")
    samples = pcm.astype(np.float32)
    if not np.isfinite(samples).all():
        raise AudioError("pcm has samples that are NaN or infinite.")
    return samples


def full_scale(samples: Samples) -> NDArray[np.float32]:
    """Samples as floats [samples] of full scale 1."""
    if not isinstance(samples, bytes):
        return samples
    integers = np.frombuffer(samples, "<i2")
    floats = np.empty(len(integers), np.float32)
    for i in range(0, len(integers), _KEEPS_LOCK):
        part = slice(i, i + _KEEPS_LOCK)
        np.multiply(integers[part], _FULL_SCALE, out=floats[part])
    return floats


def _check_rate(sample_rate: int) -> None:
    is_rate = isinstance(sample_rate, int) and not isinstance(sample_rate, bool)
    if not is_rate or not _MIN_RATE <= sample_rate <= _MAX_RATE:
        raise AudioError(
            f"sample_rate is {sample_rate!r}; it must be a whole number from {_MIN_RATE:,} to "
            f"{_MAX_RATE:,} Hz."
        )


def read_blocks(wav: Wav) -> Iterator[tuple[NDArray[np.float32], int]]:
    """Reads a recording of any length, at most 10 s and 2,097,152 decoded samples at a time.

    Args:
        wav: A path or open file that soundfile reads, or (samples, rate) with 16-bit integers or
            floats [samples] or [samples, channels].

    Yields:
        Samples [samples] of one channel, the mean of all, and their rate in Hz.

    Raises:
        AudioError: It is not readable as audio.
    """
    if isinstance(wav, tuple):
        samples, sample_rate = _mono(*wav) if len(wav) == 2 else _mono(None, None)
        size = int(_BLOCK_S * sample_rate)
        for start in range(0, len(samples), size):
            yield samples[start : start + size], sample_rate
        return
    import soundfile

    name, source = "The audio", wav
    try:
        if isinstance(wav, str | os.PathLike):
            source = name = os.fspath(wav)
            if not Path(source).is_file():
                raise AudioError(f"{name[:200]} does not exist or is not a file.")
        elif not hasattr(wav, "read"):  # soundfile would take a number for a file descriptor
            raise AudioError(f"found {type(wav).__name__}; give a path, an open file or samples.")
        with soundfile.SoundFile(source) as file:
            _check_rate(file.samplerate)
            block_size = min(int(_BLOCK_S * file.samplerate), _MAX_BLOCK_SAMPLES // file.channels)
            while len(block := file.read(block_size, dtype="float32", always_2d=True)):
                mono = block.mean(axis=1)
                yield full_scale(copy_pcm(mono, file.samplerate)), file.samplerate
    except AudioError as error:
        raise AudioError(f"{name[:200]}: {error}") from None
    except (soundfile.SoundFileError, AttributeError, OSError, TypeError, ValueError) as error:
        raise AudioError(f"{name[:200]} is not readable as audio ({error}).") from error


def _mono(samples: object, rate: object) -> tuple[NDArray[np.float32], int]:
    if not isinstance(samples, np.ndarray) or samples.ndim not in (1, 2) or not samples.size:
        raise AudioError(
            "The audio must be a path, an open file, or (samples, rate) with an array [samples] or "
            "[samples, channels] that is not empty."
        )
    rate = int(rate) if isinstance(rate, np.integer) else rate
    columns = samples[:, None] if samples.ndim == 1 else samples
    channels = [full_scale(copy_pcm(column, rate)) for column in columns.T]  # type: ignore[arg-type]
    return np.mean(channels, axis=0, dtype=np.float32), rate  # type: ignore[return-value]


class Resampler:
    """Converts the packets of one stream to 16 kHz.

    It keeps the last half second of input, so that the end of the audio so far can be computed
    without ending the stream.
    """

    def __init__(self, sample_rate: int) -> None:
        """Begins a stream of a sampling rate in Hz."""
        self._rate = sample_rate
        self._stream = self._new_stream()
        self._recent = np.zeros(0, np.float32)
        self._recent_start = 0  # in samples of the input
        self._num_out = 0

    def push(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Adds samples and returns those at 16 kHz that later ones do not change."""
        if self._stream is None:
            return samples
        out = self._stream.resample_chunk(samples)
        self._num_out += len(out)
        self._recent = np.concatenate([self._recent, samples])
        # It begins at a sample that both rates share.
        common = self._rate // math.gcd(self._rate, SAMPLE_RATE)
        drop = max(len(self._recent) - int(_MEMORY_S * self._rate), 0) // common * common
        self._recent, self._recent_start = self._recent[drop:], self._recent_start + drop
        return out

    def rest(self) -> NDArray[np.float32]:
        """Returns the samples that remain if the audio ends here; the stream can continue."""
        stream = self._new_stream()
        if stream is None or not len(self._recent):
            return np.zeros(0, np.float32)
        out = stream.resample_chunk(self._recent, last=True)
        return out[self._num_out - self._recent_start * SAMPLE_RATE // self._rate :]

    def _new_stream(self):  # soxr is imported where it is used
        if self._rate == SAMPLE_RATE:
            return None
        import soxr

        return soxr.ResampleStream(self._rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
