"""Loudness of speech in intervals of 20 ms, for word times and the runaway guard."""

import numpy as np
from numpy.typing import NDArray

INTERVAL_S = 0.02  # seconds
FRAME_INTERVALS = 4  # of a frame, which has 80 ms


def interval_peaks(frames: NDArray[np.int16]) -> NDArray[np.uint16]:
    """The largest magnitude of each interval of frames of 80 ms.

    Args:
        frames: 16-bit samples [frames, samples], of which each frame has a multiple of
            `FRAME_INTERVALS`.

    Returns:
        [frames, `FRAME_INTERVALS`], in 16-bit steps.
    """
    magnitudes = np.abs(frames).view(np.uint16)  # unsigned, since -32768 has none in int16
    num_frames, num_samples = frames.shape
    intervals = magnitudes.reshape(num_frames, FRAME_INTERVALS, num_samples // FRAME_INTERVALS)
    return np.maximum.reduce(intervals, axis=2)
