import io
import wave

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts.server.encoding import SAMPLE_RATES, AudioEncoder, AudioFormat, wav_header
from megakernel_tts.server.errors import RequestError

SAMPLES = np.arange(-32768, 32768).astype(np.int16)


@pytest.mark.parametrize("name", ["mulaw", "alaw"])
def test_companded_samples_are_those_of_g711(name: str) -> None:
    audioop = pytest.importorskip("audioop")  # removed from Python 3.13
    reference = {"mulaw": audioop.lin2ulaw, "alaw": audioop.lin2alaw}[name]
    encoder = AudioEncoder(AudioFormat.parse(f"pcm_{name}", 24_000))
    assert encoder.encode(SAMPLES) == reference(SAMPLES.tobytes(), 2)


def test_float_samples_are_within_one() -> None:
    encoded = AudioEncoder(AudioFormat("pcm_f32le")).encode(SAMPLES)
    floats = np.frombuffer(encoded, "<f4")
    assert np.array_equal(floats * 32768, SAMPLES)


@pytest.mark.parametrize("rate", SAMPLE_RATES)
@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=5))
def test_chunks_concatenate_to_the_resampled_whole(rate: int, sizes: list[int]) -> None:
    pcm = np.random.default_rng(0).integers(-9000, 9000, sum(sizes)).astype(np.int16)
    audio_format = AudioFormat("pcm_s16le", rate)
    chunked, whole = AudioEncoder(audio_format), AudioEncoder(audio_format)
    chunks = np.split(pcm, np.cumsum(sizes)[:-1])
    encoded = b"".join(chunked.encode(chunk) for chunk in chunks) + chunked.end()
    assert encoded == whole.encode(pcm) + whole.end()
    assert chunked.seconds == whole.seconds == len(encoded) / 2 / rate
    assert abs(len(encoded) / 2 - len(pcm) * rate / 24_000) <= 1


def test_the_wav_header_is_readable() -> None:
    data = wav_header(AudioFormat()) + bytes(100)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (24_000, 2, 1)


@pytest.mark.parametrize(
    ("encoding", "rate"),
    [("mp3", 24_000), (None, 24_000), ("pcm_s16le", 11_025), ("pcm_s16le", 8e3)],
)
def test_other_formats_are_refused(encoding: object, rate: object) -> None:
    with pytest.raises(RequestError):
        AudioFormat.parse(encoding, rate)
