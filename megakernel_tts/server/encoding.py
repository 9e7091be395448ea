"""Encodings of audio: sample rate, sample format, header of a wav stream."""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import soxr
from numpy.typing import NDArray

from megakernel_tts.server.errors import RequestError

Encoding = Literal["pcm_s16le", "pcm_f32le", "pcm_mulaw", "pcm_alaw"]

SOURCE_RATE = 24_000  # samples per second of every Qwen3-TTS model
SAMPLE_RATES = (8_000, 16_000, 22_050, 24_000, 44_100, 48_000)

_UNKNOWN_SIZE = 0xFFFFFFFF  # of a wav stream, whose length is known only at its end
_MULAW_BIAS, _MULAW_CLIP = 33, 8_158  # of 14-bit samples


@dataclass(frozen=True)
class AudioFormat:
    """Format of a stream's mono audio.

    Attributes:
        encoding: Format of a sample.
        sample_rate: In Hz.
    """

    encoding: Encoding = "pcm_s16le"
    sample_rate: int = SOURCE_RATE

    @property
    def sample_width(self) -> int:
        """Bytes of a sample."""
        return {"pcm_s16le": 2, "pcm_f32le": 4, "pcm_mulaw": 1, "pcm_alaw": 1}[self.encoding]

    @property
    def bytes_per_second(self) -> int:
        """Bytes of a second of audio."""
        return self.sample_rate * self.sample_width

    @classmethod
    def parse(cls, encoding: object, sample_rate: object) -> "AudioFormat":
        """Makes a format from the fields of a request.

        Raises:
            RequestError: There is no such encoding or sample rate.
        """
        known = next((name for name in get_args(Encoding) if name == encoding), None)
        if known is None:
            raise RequestError(
                f"encoding is {encoding!r}; choose one of {', '.join(get_args(Encoding))}.",
                parameter="encoding",
            )
        if type(sample_rate) is not int or sample_rate not in SAMPLE_RATES:
            raise RequestError(
                f"sample_rate is {sample_rate!r}; choose one of "
                f"{', '.join(map(str, SAMPLE_RATES))}.",
                parameter="sample_rate",
            )
        return cls(known, sample_rate)


class Encoder:
    """Encodes one stream, in chunks of any size. Chunks concatenate to the encoded whole."""

    def __init__(self, audio_format: AudioFormat) -> None:
        self._encoding: Encoding = audio_format.encoding
        rate = audio_format.sample_rate
        # In float32: soxr adds noise to 16-bit samples, which would differ between equal streams.
        self._resampler = (
            soxr.ResampleStream(SOURCE_RATE, rate, 1, dtype="float32", quality="HQ")
            if rate != SOURCE_RATE
            else None
        )

    def encode(self, pcm: NDArray[np.int16]) -> bytes:
        """Encodes the next samples.

        Args:
            pcm: int16 [samples] at 24 kHz.

        Returns:
            The samples that depend on no later sample, which may be none.
        """
        return _to_bytes(self._resample(pcm, last=False), self._encoding)

    def end(self) -> bytes:
        """Ends the stream and returns its last samples."""
        return _to_bytes(self._resample(np.zeros(0, np.int16), last=True), self._encoding)

    def _resample(self, pcm: NDArray[np.int16], *, last: bool) -> NDArray[np.int16]:
        if self._resampler is None:
            return pcm
        wave = self._resampler.resample_chunk(pcm.astype(np.float32), last=last)
        return np.rint(np.clip(wave, -32768, 32767)).astype(np.int16)


def _to_bytes(pcm: NDArray[np.int16], encoding: Encoding) -> bytes:
    if encoding == "pcm_s16le":
        return pcm.astype("<i2").tobytes()
    if encoding == "pcm_f32le":
        return (pcm.astype("<f4") / np.float32(32768)).tobytes()
    table = _mulaw_table() if encoding == "pcm_mulaw" else _alaw_table()
    return table[pcm.view(np.uint16)].tobytes()


@lru_cache(maxsize=1)
def _mulaw_table() -> NDArray[np.uint8]:
    """The mu-law code (G.711) of each 16-bit sample, whose bits are the index."""
    samples = np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.int32) >> 2
    magnitude = np.minimum(np.abs(samples), _MULAW_CLIP) + _MULAW_BIAS
    exponent = np.floor(np.log2(magnitude)).astype(np.int32) - 5
    mantissa = (magnitude >> (exponent + 1)) & 15
    sign = np.where(samples < 0, 0x80, 0)
    return (~(sign | exponent << 4 | mantissa) & 0xFF).astype(np.uint8)


@lru_cache(maxsize=1)
def _alaw_table() -> NDArray[np.uint8]:
    """The A-law code (G.711) of each 16-bit sample, whose bits are the index."""
    samples = np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.int32) >> 3
    magnitude = np.where(samples < 0, -samples - 1, samples)  # 12 bits
    exponent = np.maximum(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int32) - 4, 0)
    mantissa = (magnitude >> np.maximum(exponent, 1)) & 15
    sign = np.where(samples < 0, 0, 0x80)
    return ((sign | exponent << 4 | mantissa) ^ 0x55).astype(np.uint8)


def wav_header(audio_format: AudioFormat) -> bytes:
    """Header of a wav stream of unknown length, for every encoding.

    Args:
        audio_format: Format of the samples that follow.
    """
    tag = {"pcm_s16le": 1, "pcm_f32le": 3, "pcm_alaw": 6, "pcm_mulaw": 7}[audio_format.encoding]
    rate, width = audio_format.sample_rate, audio_format.sample_width
    form = struct.pack("<HHIIHH", tag, 1, rate, rate * width, width, 8 * width)
    riff = struct.pack("<4sI4s", b"RIFF", _UNKNOWN_SIZE, b"WAVE")
    return (
        riff + struct.pack("<4sI", b"fmt ", 16) + form + struct.pack("<4sI", b"data", _UNKNOWN_SIZE)
    )
