"""Audio between the engine and the pipeline: trimming and sample rate conversion."""

import numpy as np
import soxr
from numpy.typing import NDArray

from megakernel_tts import audible

_LEAD_S = 0.005  # kept before the first audible sample, so that no onset is cut


class Trimmer:
    """Drops the silence before speech, which would only delay the first sound.

    Attributes:
        num_dropped: Samples dropped so far.
    """

    def __init__(self, rate: int) -> None:
        self._lead_size = int(_LEAD_S * rate)
        self._pending = np.zeros(0, np.int16)  # the last samples before the onset
        self._started = False
        self.num_dropped = 0

    def trim(self, pcm: NDArray[np.int16]) -> NDArray[np.int16]:
        """Trims the next samples.

        Args:
            pcm: int16 [samples].

        Returns:
            int16 [samples], the samples to play; empty before the onset.
        """
        if self._started:
            return pcm
        joined = np.concatenate([self._pending, pcm])
        audible_samples = np.flatnonzero(audible(joined))
        self._started = bool(len(audible_samples))
        onset = int(audible_samples[0]) if self._started else len(joined)
        first = max(0, onset - self._lead_size)
        self.num_dropped += first
        if self._started:
            return joined[first:]
        self._pending = joined[first:]
        return joined[:0]


class Resampler:
    """Converts the sample rate of one stream, in chunks of any size at any time."""

    def __init__(self, source_rate: int, target_rate: int) -> None:
        self._stream = (
            soxr.ResampleStream(source_rate, target_rate, 1, dtype="int16", quality="HQ")
            if source_rate != target_rate
            else None
        )

    def convert(self, pcm: NDArray[np.int16]) -> NDArray[np.int16]:
        """Converts the next samples.

        Args:
            pcm: int16 [samples] at the source rate.

        Returns:
            int16 [samples] at the target rate that depend on no later sample.
        """
        return pcm if self._stream is None else self._stream.resample_chunk(pcm)

    def end(self) -> NDArray[np.int16]:
        """Ends the stream; gives its last samples, int16 [samples]."""
        rest = np.zeros(0, np.int16)
        return rest if self._stream is None else self._stream.resample_chunk(rest, last=True)


def silence(seconds: float, rate: int) -> bytes:
    """Silence as 16-bit PCM."""
    return bytes(2 * int(seconds * rate))
