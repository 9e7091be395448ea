"""Comparison with what transformers computes from the same checkpoints (goldens/make.py)."""

import numpy as np
import pytest
import torch

from megakernel_stt.model.checkpoint import Model
from megakernel_stt.network.encoder import OfflineEncoder
from megakernel_stt.network.features import MelStream, mel_filters, normalized
from tests.stt.conftest import LoadModel
from tests.stt.goldens.cases import CASES, FILE, LENGTHS, PROMPT, Case, audio, mels
from tests.stt.streams import decode, encode, ids, make_recogniser, packets, recognise

GOLDENS = np.load(FILE)


@pytest.mark.parametrize(
    ("name", "is_normalized"),
    [("NemotronAsrStreamingFeatureExtractor", False), ("ParakeetFeatureExtractor", True)],
)
def test_features_are_those_of_transformers(name: str, is_normalized: bool) -> None:
    stream = MelStream(mel_filters(128))
    ours = torch.cat([stream.push(torch.from_numpy(audio())), stream.rest()])
    ours = normalized(ours) if is_normalized else ours
    golden = GOLDENS[name]
    assert ours.shape == golden.shape
    assert np.abs(ours.numpy() - golden).max() <= 1e-5


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
        if case.lookahead is None:  # an offline recogniser would normalise the features
            tokens = decode(model, frames)
        else:
            recogniser = make_recogniser(model, case.lookahead)
            tokens = ids(recognise(recogniser, packets(recording, seed=length), PROMPT))
        assert tokens == GOLDENS[f"{case.name}-{length}-tokens"].tolist()
