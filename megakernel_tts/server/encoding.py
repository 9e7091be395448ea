"""Encodings of audio: sample rate, sample format or codec, header of a wav stream."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import soxr
from numpy.typing import NDArray

from megakernel_tts.server import codecs
from megakernel_tts.server.codecs import Codec, CodecEncoder
from megakernel_tts.server.errors import RequestError

SampleEncoding = Literal["pcm_s16le", "pcm_f32le", "pcm_mulaw", "pcm_alaw"]
Encoding = SampleEncoding | Codec

SOURCE_RATE = 24_000  # samples per second of every Qwen3-TTS model
SAMPLE_RATES = (8_000, 16_000, 22_050, 24_000, 44_100, 48_000)

_UNKNOWN_SIZE = 0xFFFFFFFF  # of a wav stream
_WAV_HEADER_BYTES = 44
_MAX_BIT_RATE = 320_000
_MULAW_BIAS, _MULAW_CLIP = 33, 8_158  # of 14-bit samples


@dataclass(frozen=True)
class AudioFormat:
    """Format of a stream's mono audio.

    Attributes:
        encoding: Format of a sample, or a codec.
        sample_rate: In Hz.
        bit_rate: In bits per second; None for the codec's default.
    """

    encoding: Encoding = "pcm_s16le"
    sample_rate: int = SOURCE_RATE
    bit_rate: int | None = None

    @classmethod
    def parse(cls, encoding: object, sample_rate: object) -> "AudioFormat":
        """Makes a format of plain samples from the fields of a request.

        Raises:
            RequestError: There is no such encoding or sample rate.
        """
        known = next((name for name in get_args(SampleEncoding) if name == encoding), None)
        if known is None:
            raise RequestError(
                f"encoding is {encoding!r}; choose one of {', '.join(get_args(SampleEncoding))}.",
                parameter="encoding",
            )
        return cls(known, _checked_rate(sample_rate, SAMPLE_RATES))

    @classmethod
    def compressed(
        cls, codec: Codec, sample_rate: object, bit_rate: int | None = None, *, parameter: str
    ) -> "AudioFormat":
        """Makes a format of compressed audio from the fields of a request.

        Args:
            codec: The codec.
            sample_rate: The field `sample_rate`.
            bit_rate: In bits per second; the codec takes the nearest that it has.
            parameter: Field that names the codec, for the error.

        Raises:
            RequestError: The codecs are not installed, or this one has no such rate.
        """
        if not codecs.INSTALLED:
            raise RequestError(
                f"{codec} needs the extra codecs, which this server lacks: pip install "
                "'megakernel-tts[codecs]'. Without it, ask for wav or plain samples.",
                400,
                "unsupported_format",
                parameter,
            )
        if bit_rate is not None and not 0 < bit_rate <= _MAX_BIT_RATE:
            raise RequestError(
                f"bit_rate is {bit_rate}; it must be from 1 to {_MAX_BIT_RATE}.",
                parameter=parameter,
            )
        rate = _checked_rate(sample_rate, codecs.supported_rates(codec, SAMPLE_RATES))
        return cls(codec, rate, bit_rate)


def _checked_rate(sample_rate: object, choices: Sequence[int]) -> int:
    if type(sample_rate) is not int or sample_rate not in choices:
        raise RequestError(
            f"sample_rate is {sample_rate!r}; choose one of {', '.join(map(str, choices))}.",
            parameter="sample_rate",
        )
    return sample_rate


class AudioEncoder:
    """Encodes one stream, in chunks of any size. Chunks concatenate to the encoded whole.

    It must be used by one thread at a time.
    """

    def __init__(self, audio_format: AudioFormat) -> None:
        encoding, rate = audio_format.encoding, audio_format.sample_rate
        self._rate = rate
        self._num_samples = 0
        self._codec: CodecEncoder | None = None
        self._sample_encoding: SampleEncoding = "pcm_s16le"
        if encoding in ("mp3", "opus", "aac", "flac"):
            self._codec = CodecEncoder(encoding, rate, audio_format.bit_rate)
        else:
            self._sample_encoding = encoding
        # In float32: soxr adds noise to 16-bit samples, which would differ between equal streams.
        self._resampler = (
            soxr.ResampleStream(SOURCE_RATE, rate, 1, dtype="float32", quality="HQ")
            if rate != SOURCE_RATE
            else None
        )

    @property
    def blocking(self) -> bool:
        """Whether a call takes long enough to belong on another thread than an event loop's.

        A codec takes up to a millisecond for a frame of 80 ms.
        """
        return self._codec is not None

    @property
    def seconds(self) -> float:
        """Duration of the audio so far, at the sample rate of the format."""
        return self._num_samples / self._rate

    def encode(self, pcm: NDArray[np.int16]) -> bytes:
        """Encodes the next samples.

        Args:
            pcm: int16 [samples] at 24 kHz.

        Returns:
            The bytes that depend on no later sample, which may be none.
        """
        samples = self._resample(pcm, last=False)
        return self._codec.encode(samples) if self._codec else self._to_bytes(samples)

    def end(self) -> bytes:
        """Ends the stream and returns its last bytes."""
        samples = self._resample(np.zeros(0, np.int16), last=True)
        if self._codec:
            return self._codec.encode(samples) + self._codec.end()
        return self._to_bytes(samples)

    def _resample(self, pcm: NDArray[np.int16], *, last: bool) -> NDArray[np.int16]:
        if self._resampler is not None:
            wave = self._resampler.resample_chunk(pcm.astype(np.float32), last=last)
            pcm = np.rint(np.clip(wave, -32768, 32767)).astype(np.int16)
        self._num_samples += len(pcm)
        return pcm

    def _to_bytes(self, pcm: NDArray[np.int16]) -> bytes:
        if self._sample_encoding == "pcm_s16le":
            return pcm.astype("<i2").tobytes()
        if self._sample_encoding == "pcm_f32le":
            return (pcm.astype("<f4") / np.float32(32768)).tobytes()
        table = _mulaw_table() if self._sample_encoding == "pcm_mulaw" else _alaw_table()
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


def wav_header(audio_format: AudioFormat, num_bytes: int | None = None) -> bytes:
    """Header of a wav file, for every format of samples.

    Args:
        audio_format: Format of the samples that follow.
        num_bytes: Their size; None for a stream, whose length is known only at its end.
    """
    tags = {"pcm_s16le": (1, 2), "pcm_f32le": (3, 4), "pcm_alaw": (6, 1), "pcm_mulaw": (7, 1)}
    tag, width = tags[audio_format.encoding]  # of the format, and bytes of a sample
    rate = audio_format.sample_rate
    form = struct.pack("<HHIIHH", tag, 1, rate, rate * width, width, 8 * width)
    size = _UNKNOWN_SIZE if num_bytes is None else num_bytes
    riff_size = _UNKNOWN_SIZE if num_bytes is None else num_bytes + _WAV_HEADER_BYTES - 8
    riff = struct.pack("<4sI4s", b"RIFF", riff_size, b"WAVE")
    return riff + struct.pack("<4sI", b"fmt ", 16) + form + struct.pack("<4sI", b"data", size)
