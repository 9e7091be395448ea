"""Compressed audio, by FFmpeg's encoders through PyAV (the extra `codecs`)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

INSTALLED = find_spec("av") is not None
if INSTALLED or TYPE_CHECKING:
    import av
    import av.codec

Codec = Literal["mp3", "opus", "aac", "flac"]
NAMES: tuple[Codec, ...] = get_args(Codec)

_FLAC_BLOCK_S = 0.04  # half of the shortest chunk, so that each chunk completes a block
_BIT_RATE = 64_000


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """How FFmpeg makes a format.

    Attributes:
        container: FFmpeg's name of the file format.
        encoder: FFmpeg's name of the encoder.
        media_type: MIME type of the file.
        lossy: Whether there is a bit rate.
        options: Options of the encoder.
        container_options: Options of the file format.
    """

    container: str
    encoder: str
    media_type: str
    lossy: bool = True
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    container_options: Mapping[str, str] = field(default_factory=dict[str, str])


# Each option lets bytes leave earlier, except for tags that a stream does not need.
_SETTINGS: dict[Codec, _Settings] = {
    "mp3": _Settings(
        container="mp3",
        encoder="libmp3lame",
        media_type="audio/mpeg",
        options={"reservoir": "0"},  # of bits, for which LAME holds a frame back
        container_options={"id3v2_version": "0"},
    ),
    "opus": _Settings(
        container="ogg",
        encoder="libopus",
        media_type="audio/ogg",
        options={"application": "lowdelay", "frame_duration": "20"},
        container_options={"page_duration": "20000"},  # in microseconds; otherwise a second
    ),
    "aac": _Settings(container="adts", encoder="aac", media_type="audio/aac"),
    "flac": _Settings(
        container="flac",
        encoder="flac",
        media_type="audio/flac",
        lossy=False,
        container_options={"metadata_header_padding": "0"},
    ),
}


def find(name: object) -> Codec | None:
    """The codec of a name, if there is one."""
    return next((codec for codec in NAMES if codec == name), None)


def media_type(codec: Codec) -> str:
    """MIME type of a file of the codec."""
    return _SETTINGS[codec].media_type


def supported_rates(codec: Codec, sample_rates: Iterable[int]) -> list[int]:
    """The sample rates in Hz that the codec has; it must be installed."""
    known = av.codec.Codec(_SETTINGS[codec].encoder, "w").audio_rates
    return [rate for rate in sample_rates if known is None or rate in known]


class _Output:
    """A file of which FFmpeg can write the end only, so that it never returns to the header."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        """Appends bytes; called by PyAV."""
        self._data += data
        return len(data)

    def take(self) -> bytes:
        """Takes all bytes so far."""
        data, self._data = bytes(self._data), bytearray()
        return data


class CodecEncoder:
    """Encodes one stream, in chunks of any size. Chunks concatenate to a file.

    The same samples give the same bytes, however they are divided. It must be used by one thread
    at a time.
    """

    def __init__(self, codec: Codec, sample_rate: int, bit_rate: int | None) -> None:
        """Opens the encoder.

        Args:
            codec: The codec, which must be installed.
            sample_rate: In Hz; one that the codec supports.
            bit_rate: In bits per second, of which a codec takes the nearest that it has; None for
                its default. Without effect on flac.
        """
        settings = _SETTINGS[codec]
        options = {**settings.options}
        if codec == "flac":
            options["frame_size"] = str(round(_FLAC_BLOCK_S * sample_rate))
        self._rate = sample_rate
        self._output = _Output()
        self._container = av.open(
            self._output,
            "w",
            format=settings.container,
            # bitexact: without a random identifier of the stream.
            container_options={
                "flush_packets": "1",
                "fflags": "+bitexact",
                **settings.container_options,
            },
        )
        stream = self._container.add_stream(settings.encoder, sample_rate, options)
        assert isinstance(stream, av.AudioStream)
        stream.layout = "mono"
        if settings.lossy:
            stream.bit_rate = bit_rate or _BIT_RATE
        self._stream = stream

    def encode(self, pcm: NDArray[np.int16]) -> bytes:
        """Encodes the next samples.

        Args:
            pcm: int16 [samples].

        Returns:
            The bytes that are complete, which may be none.
        """
        if len(pcm):
            frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
            frame.sample_rate = self._rate
            self._container.mux(self._stream.encode(frame))
        return self._output.take()

    def end(self) -> bytes:
        """Ends the file and returns its last bytes."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._output.take()

    def __del__(self) -> None:
        # A container that is collected while it is open writes to an output that is gone.
        if hasattr(self, "_container"):
            self._container.close()
