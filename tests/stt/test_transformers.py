"""Live comparison with transformers' models, which run the same checkpoints (minutes)."""

import numpy as np
import pytest
import torch

from megakernel_stt.comparison import generate, load_reference
from megakernel_stt.model.checkpoint import load_model
from megakernel_stt.model.random_checkpoint import Kind
from megakernel_stt.network.encoder import OfflineEncoder
from megakernel_stt.network.transducer import Transducer
from tests.stt import oracle
from tests.stt.conftest import CPU, LoadModel, MakeCheckpoint
from tests.stt.goldens.cases import BLANK_ONLY, PROMPT, SATURATED, USUAL, mels
from tests.stt.streams import decode, encode, with_prompt

pytest.importorskip("transformers", "5.23")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LENGTHS = (*range(1, 41), *range(41, 1001, 6))  # 200 lengths, in mel frames


@pytest.mark.parametrize("lookahead", [0, 1, 3, 6, 13])
def test_streamed_frames_are_those_of_the_offline_encoder(
    lookahead: int, recogniser: MakeCheckpoint, load: LoadModel
) -> None:
    model, theirs = load(), load_reference(recogniser(), "streaming")
    for length in LENGTHS:
        recording = mels(length)
        ours = encode(model, recording, lookahead)
        golden = oracle.encode(theirs, recording, lookahead)
        assert ours.shape == golden.shape
        assert (ours - golden).abs().max() <= 1e-5, length


@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
def test_offline_frames_are_those_of_transformers(
    kind: Kind, recogniser: MakeCheckpoint, load: LoadModel
) -> None:
    model, theirs = load(kind, bias=True), load_reference(recogniser(kind, bias=True), kind)
    encoder = OfflineEncoder(model.weights.encoder, model.config.encoder)
    for length in LENGTHS:
        ours = encoder.encode(mels(length))[0]
        golden = oracle.encode(theirs, mels(length), None)
        assert ours.shape == golden.shape
        assert (ours - golden).abs().max() <= 1e-5, length


@pytest.mark.parametrize("kind", ["streaming", "multilingual"])
@pytest.mark.parametrize("blank_bias", [USUAL, SATURATED, BLANK_ONLY])
@pytest.mark.parametrize("lookahead", [0, 1, 3, 6, 13])
def test_streamed_tokens_of_ragged_batches_are_those_of_transformers(
    kind: Kind,
    blank_bias: float,
    lookahead: int,
    recogniser: MakeCheckpoint,
    load: LoadModel,
) -> None:
    theirs = load_reference(recogniser(kind, blank_bias=blank_bias), kind)
    ours = load(kind, blank_bias=blank_bias)
    generator = np.random.default_rng(lookahead)
    for _ in range(20):
        lengths = generator.integers(1, 120, generator.integers(1, 7))
        golden = generate(theirs, [mels(n) for n in lengths], lookahead)
        frames = [with_prompt(ours, encode(ours, mels(n), lookahead), PROMPT) for n in lengths]
        assert [decode(ours, one) for one in frames] == golden


@pytest.mark.parametrize("blank_bias", [USUAL, SATURATED, BLANK_ONLY])
def test_decoded_tokens_of_ragged_batches_are_those_of_transformers(
    blank_bias: float, recogniser: MakeCheckpoint
) -> None:
    """The decoder alone, with frames of transformers' offline encoder, in one ragged batch."""
    folder = recogniser("rnnt", blank_bias=blank_bias)
    theirs, model = load_reference(folder, "rnnt"), load_model(folder, CPU, torch.float32)
    transducer = Transducer(model.weights.transducer, model.config.transducer)
    generator = np.random.default_rng(0)
    for _ in range(20):
        lengths = generator.integers(1, 120, generator.integers(1, 7))
        golden = generate(theirs, [mels(n) for n in lengths], None)
        frames = [oracle.encode(theirs, mels(n), None) for n in lengths]
        batch = torch.nn.utils.rnn.pad_sequence(frames, batch_first=True)
        start = type(transducer.start()).join([transducer.start() for _ in lengths])
        found, _ = transducer.decode(batch, [len(f) for f in frames], start)
        assert [[e.token for e in emissions] for emissions in found] == golden
