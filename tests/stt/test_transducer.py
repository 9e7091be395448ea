"""The decoder against a decoder that looks at one frame after the other (oracle.py)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.random_checkpoint import Kind
from megakernel_stt.network.transducer import Transducer, TransducerState, confidence
from tests.stt.batches import decode, random_frames, triples
from tests.stt.conftest import LoadModel
from tests.stt.oracle import decode_by_frames

# Added to the logits of blank: all sorts of texts, no text, and as many tokens as there can be.
BLANK_BIASES = (0.0, 2.0, 4.0, 100.0, -100.0)


def decoder(load: LoadModel, kind: Kind, blank_bias: float) -> tuple[Transducer, TransducerConfig]:
    model = load(kind, blank_bias=blank_bias)
    return Transducer(model.weights.transducer, model.config.transducer), model.config.transducer


@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
@pytest.mark.parametrize("blank_bias", BLANK_BIASES)
def test_ragged_batches_are_decoded_as_frame_by_frame(
    kind: Kind, blank_bias: float, load: LoadModel
) -> None:
    transducer, config = decoder(load, kind, blank_bias)
    weights = load(kind, blank_bias=blank_bias).weights.transducer
    generator = np.random.default_rng(1)
    for batch in range(3):
        lengths = [0, *generator.integers(0, 13, generator.integers(1, 5)).tolist()]
        frames = [random_frames(n, batch) for n in lengths]
        found, _ = decode(transducer, frames)
        assert [triples(f) for f in found] == [decode_by_frames(weights, config, f) for f in frames]
        assert blank_bias != 100.0 or not any(found)


@pytest.mark.parametrize("durations", [(0,), (0, 1), (3, 0, 2), (4, 1)])
@pytest.mark.parametrize("max_symbols", [1, 3])
def test_other_durations_are_decoded_as_frame_by_frame(
    durations: tuple[int, ...], max_symbols: int, load: LoadModel
) -> None:
    """With durations of 0 only, every token but the last of a frame stays at the frame."""
    model = load("tdt")
    config = replace(model.config.transducer, durations=durations, max_symbols=max_symbols)
    head = model.weights.transducer.head
    count = config.vocab_size + len(durations)
    assert head.bias is not None
    head = replace(head, weight=head.weight[:count], bias=head.bias[:count])
    weights = replace(model.weights.transducer, head=head)
    for length in (1, 7, 16):
        frames = random_frames(length)
        found, _ = decode(Transducer(weights, config), [frames])
        assert triples(found[0]) == decode_by_frames(weights, config, frames)
        if durations == (0,):
            assert len(found[0]) <= max_symbols * length


@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
def test_chunks_are_decoded_as_the_whole(kind: Kind, load: LoadModel) -> None:
    """Durations may lead beyond the end of a chunk, and beyond whole chunks."""
    transducer, _ = decoder(load, kind, 2.0)
    for size in (1, 3, 7):
        frames = random_frames(22, size)
        whole, _ = decode(transducer, [frames])
        states, parts = [transducer.start()], []
        for chunk in frames.split(size):
            found, states = decode(transducer, [chunk], states)
            parts += found[0]
        assert whole[0] and triples(parts) == triples(whole[0])


@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
def test_a_batch_is_decoded_as_solo_streams(kind: Kind, load: LoadModel) -> None:
    """Bit for bit: tokens, confidence and state."""
    transducer, _ = decoder(load, kind, 2.0)
    frames = [random_frames(16, seed) for seed in range(4)]
    together, states = decode(transducer, frames)
    for i, one in enumerate(frames):
        solo, [state] = decode(transducer, [one])
        assert solo[0] == together[i]
        assert torch.equal(state.hidden, states[i].hidden)
        assert torch.equal(state.output, states[i].output)


def test_decoding_does_not_change_the_state_that_it_begins_from(load: LoadModel) -> None:
    transducer, _ = decoder(load, "rnnt", 2.0)
    start = transducer.start()
    before = TransducerState.join([start]).split()[0]
    first, _ = decode(transducer, [random_frames(20)], [start])
    assert torch.equal(start.hidden, before.hidden) and torch.equal(start.output, before.output)
    again, _ = decode(transducer, [random_frames(20)], [start])
    assert first[0] and first == again


def test_confidence_is_one_for_certainty_and_zero_for_equal_logits() -> None:
    certain = torch.tensor([0.0, 0.0, 1000.0, 0.0])
    values = confidence(torch.stack([certain, torch.zeros(4), torch.tensor([0.0, 0, 3, 0])]))
    assert values[0] == 1 and values[1].abs() < 1e-6 and 0 < values[2] < 1


def test_confidence_is_the_published_entropy() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)).double()
    p, order = logits.softmax(-1), 1 / 3
    entropy = (1 - p.pow(order).sum(-1)) / (order - 1)
    most = (1 - 9 ** (1 - order)) / (order - 1)
    expected = (torch.exp(-entropy) - np.exp(-most)) / (1 - np.exp(-most))
    assert torch.allclose(confidence(logits), expected.float(), atol=1e-5)


def test_of_equal_logits_the_lowest_id_is_chosen(load: LoadModel) -> None:
    model = load("rnnt", blank_bias=-100.0)
    head = model.weights.transducer.head
    weight, bias = torch.zeros_like(head.weight), torch.zeros(len(head.weight))
    weights = replace(model.weights.transducer, head=replace(head, weight=weight, bias=bias))
    found, _ = decode(Transducer(weights, model.config.transducer), [random_frames(1)])
    assert [e.token for e in found[0]] == [0] * model.config.transducer.max_symbols
