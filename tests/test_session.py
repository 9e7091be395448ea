import numpy as np
import pytest

from megakernel_tts import AudioChunk


@pytest.mark.parametrize(
    ("pcm", "num_frames", "is_break"),
    [
        (np.zeros(1920, np.int16), 0, True),
        (np.zeros(0, np.int16), 0, False),  # words alone
        (np.zeros(1920, np.int16), 1, False),  # silence of the model
        (np.ones(1920, np.int16), 0, False),  # the rest of a segment at another speed
    ],
)
def test_only_silence_without_frames_is_a_break(
    pcm: np.ndarray, num_frames: int, is_break: bool
) -> None:
    assert AudioChunk(pcm, 24_000, np.zeros((num_frames, 16), np.int64), 0).is_break is is_break
