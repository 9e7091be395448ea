"""Speech at another speed and the same pitch, by FFmpeg's filter `atempo` (the extra `speed`)."""

from contextlib import suppress
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray

from megakernel_common.errors import MissingExtraError
from megakernel_tts.errors import SpeedError

MIN_SPEED, MAX_SPEED = 0.5, 2.0

_BLOCK = 480  # samples that the filter takes at once; a frame of the codec has a multiple of it
_FLUSH = 4096  # samples of silence that push all of the speech out of the filter


@cache
def can_scale() -> bool:
    """Whether the extra `speed` is installed; imports it."""
    try:
        from av.filter import Graph
    except ImportError:
        return False
    return hasattr(Graph, "threads")  # without it, every filter starts a thread per processor


def check_speed(speed: float) -> None:
    """Checks a speed, and that this installation can speak at it.

    Args:
        speed: How many times as fast as ordinary speech; 1 needs no filter.

    Raises:
        SpeedError: It is no number from 0.5 to 2.
        MissingExtraError: It is not 1, and the extra `speed` is not installed.
    """
    number = isinstance(speed, int | float) and not isinstance(speed, bool)
    if not (number and MIN_SPEED <= speed <= MAX_SPEED):  # also refuses NaN
        raise SpeedError(f"speed is {speed!r}; it must be a number from 0.5 to 2.")
    if speed != 1 and not can_scale():
        raise MissingExtraError(
            "A speed other than 1 needs PyAV 17.1 or newer, which is not installed; install the "
            "extra speed: pip install 'megakernel-tts[speed]'."
        )


class TimeScaler:
    """Changes the speed of one stream of samples. Its output does not depend on their portions.

    At most 90 ms of input are held back. After the end the output has round(n / speed) samples.
    """

    def __init__(self, speed: float, sample_rate: int) -> None:
        """Prepares the filter.

        Args:
            speed: From 0.5 to 2.
            sample_rate: In Hz.
        """
        from av.filter import Graph

        self._graph = Graph()  # must outlive its filters
        self._graph.threads = 1
        self._source = self._graph.add_abuffer(
            sample_rate=sample_rate,
            format="s16",
            layout="mono",
            time_base=Fraction(1, sample_rate),
        )
        self._sink = self._graph.add("abuffersink")
        self._graph.link_nodes(self._source, self._graph.add("atempo", str(speed)), self._sink)
        self._graph.configure()
        self._speed = speed
        self._sample_rate = sample_rate
        self._pending = np.zeros(0, np.int16)  # samples of an incomplete block
        self._num_in = 0
        self._num_out = 0

    def push(self, pcm: NDArray[np.int16]) -> NDArray[np.int16]:
        """Scales the next samples.

        Args:
            pcm: int16 [samples].

        Returns:
            int16 [samples] that no later sample changes.
        """
        scaled = self._filter(pcm)
        self._num_in += len(pcm)
        self._num_out += len(scaled)
        return scaled

    def end(self) -> NDArray[np.int16]:
        """Ends the stream; returns its last samples, int16 [samples]."""
        num_missing = round(self._num_in / self._speed) - self._num_out
        return self._filter(np.zeros(_FLUSH, np.int16))[: max(0, num_missing)]

    def _filter(self, pcm: NDArray[np.int16]) -> NDArray[np.int16]:
        """Passes whole blocks through the filter: its output depends on how samples are grouped."""
        from av import AudioFrame

        samples = np.concatenate([self._pending, pcm])
        num_whole = len(samples) // _BLOCK * _BLOCK
        self._pending = samples[num_whole:]
        scaled = [np.zeros(0, np.int16)]
        for block in samples[:num_whole].reshape(-1, 1, _BLOCK):
            frame = AudioFrame.from_ndarray(block, "s16", "mono")
            frame.sample_rate = self._sample_rate
            self._source.push(frame)
            with suppress(BlockingIOError):  # no more output for this input
                while isinstance(ready := self._sink.pull(), AudioFrame):
                    scaled.append(ready.to_ndarray()[0])
        return np.concatenate(scaled)
