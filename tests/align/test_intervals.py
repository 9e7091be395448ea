import numpy as np

from megakernel_tts.align.intervals import FRAME_INTERVALS, interval_peaks


def test_the_peak_of_an_interval_is_its_largest_magnitude() -> None:
    levels = [[-32768, -201, 200, 0], [32767, -1, 1, -32767]]
    frames = np.zeros((2, FRAME_INTERVALS, 3), np.int16)
    for position in range(3):
        frames[:] = 0
        frames[:, :, position] = levels
        peaks = interval_peaks(frames.reshape(2, -1))
        assert peaks.tolist() == np.abs(np.array(levels)).tolist()
    assert interval_peaks(np.zeros((0, 12), np.int16)).shape == (0, FRAME_INTERVALS)
