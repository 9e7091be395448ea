"""Decoding of compressed audio, and its comparison with samples."""

import io

import av
import numpy as np
from numpy.typing import NDArray

RATE = 24_000
MAX_PADDING = 3 * 1152  # samples that a decoder adds at most: the codec's delay, whole frames


def decoded(data: bytes) -> NDArray[np.float64]:
    """The audio of a file at 24 kHz."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
    with av.open(io.BytesIO(data), "r") as file:
        frames = [f for frame in file.decode(audio=0) for f in resampler.resample(frame)]
    frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames]).astype(float)


def assert_same_audio(data: bytes, pcm: NDArray[np.int16], rate: int = RATE) -> None:
    """Checks duration and waveform of a file, which may begin with the delay of its codec."""
    wave = decoded(data)
    assert 0 <= len(wave) - len(pcm) <= MAX_PADDING * RATE / rate
    delay = int(np.correlate(wave, pcm.astype(float), "valid").argmax())
    assert np.corrcoef(wave[delay : delay + len(pcm)], pcm)[0, 1] > 0.98
