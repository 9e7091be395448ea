"""Log-mel features of a recording and its chunks (equality with transformers: test_goldens.py)."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel_stt.model.config import HOP_SIZE
from megakernel_stt.network.features import (
    PAST_SIZE,
    LogMel,
    complete_mels_of,
    normalized,
    samples_of,
)
from tests.stt.conftest import CPU, LoadModel
from tests.stt.goldens.cases import audio
from tests.stt.streams import decode, encode, ids, make_recogniser, packets, recognise, sound

LOG_MEL = LogMel(80, CPU)


def whole(samples: NDArray[np.float32]) -> torch.Tensor:
    return LOG_MEL.recording(samples)


@pytest.mark.parametrize("num_mels", [1, 8, 56])
def test_adjacent_mel_frames_of_several_streams_are_those_of_each_recording(num_mels: int) -> None:
    """At any phase, where it begins, and where it ends."""
    generator, rows, golden = np.random.default_rng(num_mels), [], []
    counts, size = [], samples_of(num_mels)
    for seconds, num_dropped in ((0.05, 0), (0.5, 70), (0.95, 77)):  # before or behind a mel frame
        samples = audio(seconds)
        samples = samples[: len(samples) - num_dropped]
        mels = whole(samples)
        for first in (-7, 1, len(mels) - 2):
            start = first * HOP_SIZE - PAST_SIZE
            row = np.concatenate([np.zeros(max(-start, 0), np.float32), samples[max(start, 0) :]])
            counts.append(min(len(row), size))
            behind = generator.standard_normal(size).astype(np.float32)  # does not matter
            rows.append(np.concatenate([row, behind])[:size])
            index = torch.arange(first, first + num_mels)
            golden.append((mels, index))
    found = LOG_MEL(torch.from_numpy(np.stack(rows)), torch.tensor(counts))
    for ours, (mels, index) in zip(found, golden, strict=True):
        inside = (index >= 0) & (index < len(mels))
        assert torch.equal(ours[inside], mels[index[inside]])  # bit for bit


def test_complete_mel_frames_do_not_depend_on_later_samples() -> None:
    samples = audio(0.3)
    mels = whole(samples)
    for length in (0, 198, 200, 201, 358, 1000, 4321):
        count = complete_mels_of(length)
        changed = np.concatenate([samples[:length], np.ones(len(samples) - length, np.float32)])
        assert torch.equal(whole(changed)[:count], mels[:count])
        assert count == len(mels) or not torch.equal(whole(changed)[count], mels[count])


@pytest.mark.parametrize("lookahead", [0, 3])
def test_chunks_are_recognised_by_the_features_of_the_whole(
    lookahead: int, load: LoadModel
) -> None:
    """Of samples that arrive in packets of any size, to an end at any phase of a chunk."""
    model = load("streaming", blank_bias=4.0)
    log_mel = LogMel(model.config.encoder.num_mels, CPU)
    for seed, length in enumerate((199, 1_500, 16_000, 16_123)):
        samples = sound(101, seed)[:length]
        found = recognise(make_recogniser(model, lookahead), packets(samples, seed))
        frames = encode(model, log_mel.recording(samples), lookahead)
        assert ids(found) == decode(model, frames) and found.num_frames == len(frames)
        assert length < 16_000 or len(ids(found)) > 3


def test_a_long_recording_is_computed_in_blocks() -> None:
    samples = np.resize(audio(0.95), 1500 * HOP_SIZE)
    mels, split = whole(samples), 1100 * HOP_SIZE
    assert torch.equal(mels[:1000], whole(samples[:split])[:1000])
    assert torch.equal(mels[1102:], whole(samples[split:])[2:])


@pytest.mark.parametrize("length", [0, 1, 159, 160, 199, 200, 201, 361, 4000])
def test_a_recording_has_a_frame_for_each_160_samples(length: int) -> None:
    samples = audio()[:length]
    assert whole(samples).shape == (length // 160, 80)


def test_silence_has_the_floor_as_features() -> None:
    assert torch.allclose(whole(np.zeros(1600, np.float32)), torch.tensor(-24 * np.log(2)).float())


def test_normalised_bins_have_mean_0_and_deviation_1() -> None:
    mels = normalized(torch.randn(50, 8) * 3 + 2)
    assert torch.allclose(mels.mean(0), torch.zeros(8), atol=1e-5)
    assert torch.allclose(mels.std(0), torch.ones(8), atol=1e-4)
    assert torch.equal(normalized(torch.randn(1, 8)), torch.zeros(1, 8))
    assert normalized(torch.zeros(0, 8)).shape == (0, 8)
