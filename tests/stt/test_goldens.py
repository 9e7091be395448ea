"""Comparison with what transformers computes from the same checkpoints (goldens/make.py)."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from megakernel_stt.model.checkpoint import Model
from megakernel_stt.network.encoder import OfflineEncoder
from megakernel_stt.network.features import LogMel, mel_filters, normalized
from tests.stt.conftest import CPU, LoadModel
from tests.stt.goldens.cases import CASES, FILE, LENGTHS, PROMPT, Case, audio, mels
from tests.stt.streams import decode, encode, with_prompt

GOLDENS = np.load(FILE)
ROUNDING = 2**-24  # relative error of a float32 operation


def rounding_error(log_mels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bounds the difference of features [frames, mels] that two float32 transforms compute.

    A transform of N samples rounds log2(N) times, and spreads this error evenly over its bins: that
    of an amplitude is log2(N) roundings of the frame's root mean square amplitude, which is the
    norm of its windowed samples. In a band that is almost silent this is a large part.
    """
    samples = audio().astype(np.float64)
    emphasised = np.append(samples[0], samples[1:] - 0.97 * samples[:-1])
    windows = sliding_window_view(np.pad(emphasised, 200), 400)[::160] * np.hanning(400)
    norms = np.linalg.norm(windows[: len(log_mels)], axis=1, keepdims=True)
    weights = mel_filters(128).numpy().sum(axis=1)
    errors = np.sqrt(weights) * 2 * np.log2(512) * ROUNDING * norms  # of square roots of `powers`
    with_floor = np.exp(log_mels)
    powers = np.maximum(with_floor - 2**-24, 0.0)
    of_powers = 2 * np.sqrt(powers) * errors + errors**2
    return of_powers / with_floor + 2 * ROUNDING * np.abs(log_mels)


@pytest.mark.parametrize(
    ("name", "is_normalized"),
    [("NemotronAsrStreamingFeatureExtractor", False), ("ParakeetFeatureExtractor", True)],
)
def test_features_are_those_of_transformers(name: str, is_normalized: bool) -> None:
    ours = LogMel(128, CPU).recording(audio())
    error = rounding_error(ours.double().numpy())
    if is_normalized:  # the mean and the deviation have an error, too
        deviation, ours = ours.std(dim=0).numpy(), normalized(ours)
        mean_error = np.sqrt(np.square(error).mean(axis=0))
        error = (error + (1 + ours.abs().numpy()) * mean_error) / deviation + 4 * ROUNDING
    golden = GOLDENS[name]
    assert ours.shape == golden.shape
    assert (np.abs(ours.numpy() - golden) <= error).all()
    assert np.median(error) <= 1e-5  # of what is not almost silent


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_frames_and_tokens_are_those_of_transformers(case: Case, load: LoadModel) -> None:
    model: Model = load(case.kind, bias=case.bias, blank_bias=case.blank_bias)
    for length in LENGTHS:
        recording = mels(length)
        if case.lookahead is None:
            encoder = OfflineEncoder(model.weights.encoder, model.config.encoder)
            frames = encoder.encode(recording)[0]
        else:
            frames = encode(model, recording, case.lookahead)
        golden = GOLDENS[f"{case.name}-{length}-frames"]
        assert frames.shape == golden.shape
        assert np.abs(frames.numpy() - golden).max() <= 1e-5
        if case.kind == "tdt":
            continue
        tokens = decode(model, with_prompt(model, frames, PROMPT))
        assert tokens == GOLDENS[f"{case.name}-{length}-tokens"].tolist()
