"""The engine's audio on its way into the pipeline: trimmed, and at the pipeline's rate."""

import numpy as np
import soxr
from numpy.typing import NDArray

from megakernel_tts import audible

_LEAD = 0.005  # seconds kept before the first audible sample, so that no onset is cut


class Trimmer:
    """Drops the silence before speech: it would only delay the first sound.

    Attributes:
        dropped: Samples, so far.
    """

    def __init__(self, rate: int) -> None:
        self._lead = int(_LEAD * rate)
        self._before = np.zeros(0, np.int16)
        self._started = False
        self.dropped = 0

    def trim(self, pcm: NDArray[np.int16]) -> NDArray[np.int16]:
        """Takes the next samples; gives those that are to be heard, none before the onset."""
        if self._started:
            return pcm
        joined = np.concatenate([self._before, pcm])
        sounds = np.flatnonzero(audible(joined))
        self._started = bool(len(sounds))
        kept = max(0, (int(sounds[0]) if self._started else len(joined)) - self._lead)
        self.dropped += kept
        if self._started:
            return joined[kept:]
        self._before = joined[kept:]
        return joined[:0]


class Resampler:
    """Converts one stream from rate to rate. Chunks may come at any time: no state is dropped."""

    def __init__(self, source: int, target: int) -> None:
        self._stream = (
            soxr.ResampleStream(source, target, 1, dtype="int16", quality="HQ")
            if source != target
            else None
        )

    def convert(self, pcm: NDArray[np.int16]) -> NDArray[np.int16]:
        """Takes the next samples; gives those that are certain by now."""
        return pcm if self._stream is None else self._stream.resample_chunk(pcm)

    def end(self) -> NDArray[np.int16]:
        """Gives what is left at the end of the stream."""
        rest = np.zeros(0, np.int16)
        return rest if self._stream is None else self._stream.resample_chunk(rest, last=True)


def silence(seconds: float, rate: int) -> bytes:
    """16-bit silence."""
    return bytes(2 * int(seconds * rate))
