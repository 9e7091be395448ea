"""Audio between the engine and the pipeline: trimming and sample rate conversion."""

import numpy as np
import soxr
from numpy.typing import NDArray

from megakernel_tts import audible

_LEAD_S = 0.005  # kept before the first audible sample, so that no onset is cut
_JOINT_S = 0.04  # of silence kept on either side of a boundary within a phrase


class Trimmer:
    """Drops silence: before speech, where it would only delay the first sound, and at joints.

    A joint is a boundary of two segments of the text within a phrase, where speech has a longer
    silence than between words.
    """

    def __init__(self, rate: int) -> None:
        """Starts before the first sound.

        Args:
            rate: Samples per second.
        """
        self._num_joint = int(_JOINT_S * rate)
        self._num_kept_before = int(_LEAD_S * rate)  # of silence that is being dropped
        self._dropping = True  # silence, until the next sound
        self._holding = False  # silence at the end, which a joint may drop
        self._num_silent = 0  # samples that were output since the last sound, while holding
        self._pending = np.zeros(0, np.int16)  # silence that may be dropped
        self._num_in = 0  # samples, without those that are pending
        self._cuts: list[tuple[int, int]] = []  # input positions and sizes of what was dropped

    def expect_joint(self) -> None:
        """Announces that the segment that is being spoken ends within a phrase."""
        if not self._holding:
            self._holding, self._num_silent = True, 0

    def begin_segment(self) -> None:
        """Begins a segment: at a joint, if one is expected, the silence around it is dropped."""
        if self._holding:
            self._drop(len(self._pending))
            self._holding, self._dropping = False, True
            self._num_kept_before = self._num_joint

    def trim(self, pcm: NDArray[np.int16]) -> NDArray[np.int16]:
        """Trims the next samples.

        Args:
            pcm: int16 [samples].

        Returns:
            int16 [samples], the samples to play next.
        """
        self._pending = np.concatenate([self._pending, pcm])
        if self._dropping:
            sounds = np.flatnonzero(audible(self._pending))
            onset = int(sounds[0]) if len(sounds) else len(self._pending)
            self._drop(max(0, onset - self._num_kept_before))
            if not len(sounds):
                return self._take(0)
            self._dropping = False
        return self._take(self._num_until_held() if self._holding else len(self._pending))

    def keep(self, pcm: NDArray[np.int16]) -> NDArray[np.int16]:
        """Passes on the next samples whether they are silence or not, int16 [samples]."""
        self._pending = np.concatenate([self._pending, pcm])
        return self._take(len(self._pending))

    def _num_until_held(self) -> int:
        """Pending samples up to the silence at their end that a joint would drop."""
        sounds = np.flatnonzero(audible(self._pending))
        end = 0
        if len(sounds):
            end, self._num_silent = int(sounds[-1]) + 1, 0
        num_kept = min(len(self._pending) - end, self._num_joint - self._num_silent)
        self._num_silent += num_kept
        return end + num_kept

    def end(self) -> NDArray[np.int16]:
        """Gives the samples that were held at the end, int16 [samples]."""
        return self._take(0 if self._dropping else len(self._pending))

    def output_position(self, position: int) -> int:
        """Position in the output of a sample of the input, or of the next one if it was dropped.

        Args:
            position: Index of a sample.
        """
        return position - sum(min(size, max(0, position - start)) for start, size in self._cuts)

    def _drop(self, size: int) -> None:
        """Drops the first pending samples."""
        if size:
            self._cuts.append((self._num_in, size))
            self._take(size)

    def _take(self, size: int) -> NDArray[np.int16]:
        """Takes the first pending samples."""
        taken, self._pending = self._pending[:size], self._pending[size:]
        self._num_in += size
        return taken


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
