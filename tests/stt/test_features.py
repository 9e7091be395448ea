"""Log-mel features as audio arrives (equality with transformers: test_goldens.py)."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel_stt.network.features import MelStream, mel_filters, normalized, take_mel_frames
from tests.stt.goldens.cases import audio

FILTERS = mel_filters(80)


def whole(samples: NDArray[np.float32]) -> torch.Tensor:
    stream = MelStream(FILTERS)
    return torch.cat([stream.push(samples), stream.rest()])


@pytest.mark.parametrize("seed", range(4))
def test_packets_of_any_size_give_the_features_of_the_whole(seed: int) -> None:
    samples = audio(1.0)
    generator, stream = np.random.default_rng(seed), MelStream(FILTERS)
    sizes = generator.integers(0, [2, 200, 1000, 4000][seed], 16_000)
    parts = [stream.push(part) for part in np.split(samples, np.cumsum(sizes))]
    streamed = torch.cat([*parts, stream.rest()])
    assert torch.equal(streamed, whole(samples))  # bit for bit
    assert stream.num_samples == len(samples)


def test_streams_that_are_computed_together_have_the_features_of_each() -> None:
    generator = np.random.default_rng(0)
    recordings = [audio(seconds) for seconds in (0.05, 0.5, 0.95)]
    streams, parts = [MelStream(FILTERS) for _ in recordings], [[] for _ in recordings]
    for i in range(0, max(map(len, recordings)), 600):
        for stream, samples in zip(streams, recordings, strict=True):
            for packet in np.array_split(samples[i : i + 600], generator.integers(1, 4)):
                stream.add(packet)
        ready = [stream.num_ready for stream in streams]
        for found, count, frames in zip(parts, ready, take_mel_frames(streams), strict=True):
            assert len(frames) == count
            found.append(frames)
    for stream, found, samples in zip(streams, parts, recordings, strict=True):
        assert torch.equal(torch.cat([*found, stream.rest()]), whole(samples))  # bit for bit


@pytest.mark.parametrize("length", [0, 1, 159, 160, 199, 200, 201, 361, 4000])
def test_a_recording_has_a_frame_for_each_160_samples(length: int) -> None:
    samples = audio()[:length]
    assert whole(samples).shape == (length // 160, 80)


def test_the_rest_does_not_change_the_stream() -> None:
    samples, stream = audio(), MelStream(FILTERS)
    parts = []
    for part in np.split(samples, range(777, len(samples), 777)):
        parts.append(stream.push(part))
        cut = stream.num_samples
        assert torch.equal(torch.cat([*parts, stream.rest()]), whole(samples[:cut]))


def test_silence_has_the_floor_as_features() -> None:
    assert torch.allclose(whole(np.zeros(1600, np.float32)), torch.tensor(-24 * np.log(2)).float())


def test_normalised_bins_have_mean_0_and_deviation_1() -> None:
    mels = normalized(torch.randn(50, 8) * 3 + 2)
    assert torch.allclose(mels.mean(0), torch.zeros(8), atol=1e-5)
    assert torch.allclose(mels.std(0), torch.ones(8), atol=1e-4)
    assert torch.equal(normalized(torch.randn(1, 8)), torch.zeros(1, 8))
    assert normalized(torch.zeros(0, 8)).shape == (0, 8)
