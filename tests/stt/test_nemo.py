"""The decoders against NeMo's: recorded results (goldens/make_nemo.py), and NeMo itself.

NeMo 3.0.0 differs from its published algorithm in three cases, which are left out:
    Durations by label looping in torch, which runs without a GPU: a token's duration is that of
    the batch's last joint step if another recording looks at more frames. The functions that the
    CUDA graph records do not have this error. Durations by label looping are therefore compared
    only in batches of which one recording at most has frames.
    Frame by frame, TDT: where the step that reaches `max_symbols` has a duration, NeMo goes one
    frame further than this duration.
    Batches without any frame are refused.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.nemo_transducer import NemoTransducer, nemo_is_installed
from megakernel_common.checkpoint import map_leaves
from megakernel_stt.kernels.transducer import load_transducer
from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.weights import TransducerWeights
from megakernel_stt.network.transducer import Transducer
from tests.emulator.transducer import emulated_transducer
from tests.stt.batches import decode, padded, triples
from tests.stt.conftest import LoadModel
from tests.stt.goldens.decodings import (
    BATCHES,
    BLANK_ONLY,
    DECODINGS,
    FILE,
    NUM_RECORDED,
    SATURATED,
    Decoding,
)

Triples = list[tuple[int, int, int]]

GOLDENS = np.load(FILE)
TARGETS = ["torch", "emulator", pytest.param("cuda", marks=pytest.mark.gpu)]

each_decoding = pytest.mark.parametrize("decoding", DECODINGS, ids=lambda d: d.name)


def decoder(weights: TransducerWeights, config: TransducerConfig, target: str) -> Transducer:
    """Our decoder: in torch, or the kernels on the emulator or a GPU."""
    if target == "torch":
        return Transducer(weights, config)
    if target == "emulator":
        return emulated_transducer(weights, config)
    return load_transducer(map_leaves(weights, Tensor.cuda), config)


def decode_at(transducer: Transducer, frames: list[Tensor]) -> list[Triples]:
    """Decodes frames of the CPU where the decoder's weights are."""
    like = transducer.start().output
    found, _ = decode(transducer, [f.to(like) for f in frames])
    return [triples(emissions) for emissions in found]


def recorded(decoding: Decoding, index: int) -> list[Triples]:
    """What NeMo decoded of a batch."""
    rows = iter(GOLDENS[f"{decoding.name}-{index}-tokens"].tolist())
    counts = GOLDENS[f"{decoding.name}-{index}-counts"].tolist()
    return [[tuple(next(rows)) for _ in range(count)] for count in counts]


def frames_and_tokens(found: list[Triples]) -> list[list[tuple[int, int]]]:
    return [[(token, frame) for token, frame, _ in recording] for recording in found]


@pytest.mark.parametrize("target", TARGETS)
@each_decoding
def test_tokens_are_those_that_nemo_decoded(
    decoding: Decoding, target: str, load: LoadModel
) -> None:
    """Tokens, frames and durations."""
    model = load(decoding.kind, blank_bias=decoding.blank_bias)
    ours = decoder(*decoding.decoder(model), target)
    for i, frames in enumerate(decoding.batches(NUM_RECORDED)):
        found = decode_at(ours, frames)
        assert found == recorded(decoding, i)
        if decoding.blank_bias == BLANK_ONLY:
            assert not any(found)
        if decoding.blank_bias == SATURATED and decoding.durations in (None, (0,)):
            assert [len(f) for f in found] == [decoding.max_symbols * len(f) for f in frames]


def test_recorded_batches_have_tokens() -> None:
    """Except of the decodings whose tokens are all blank."""
    for decoding in DECODINGS:
        count = sum(len(found) for i in range(NUM_RECORDED) for found in recorded(decoding, i))
        assert (count == 0) == (decoding.blank_bias == BLANK_ONLY), decoding


class TestNemo:
    """NeMo beside ours (minutes)."""

    pytestmark: ClassVar = [
        pytest.mark.slow,
        pytest.mark.filterwarnings("ignore"),
        pytest.mark.skipif(not nemo_is_installed(), reason="NeMo is not installed"),
    ]

    @pytest.mark.parametrize("target", TARGETS)
    @each_decoding
    def test_label_looping_of_500_ragged_batches(
        self, decoding: Decoding, target: str, load: LoadModel
    ) -> None:
        """500 of RNN-T and 500 of TDT; some recordings are empty, and some batches all of them."""
        weights, config = self.decoder(decoding, load)
        ours = decoder(weights, config, target)
        looping = NemoTransducer(weights, config, "labels")
        graph = NemoTransducer(weights, config, "graph_steps")
        for frames, found in self.decoded(decoding, ours):
            assert found == graph.decode(*padded(frames))
            by_torch = looping.decode(*padded(frames))
            assert frames_and_tokens(found) == frames_and_tokens(by_torch)
            if sum(len(recording) > 0 for recording in frames) <= 1:
                assert found == by_torch

    @each_decoding
    def test_frame_by_frame(self, decoding: Decoding, load: LoadModel) -> None:
        """NeMo's loop over frames, which shares no code with its label looping.

        It begins with zeros instead of the embedding of blank, which are zeros in released models.
        """
        if decoding.durations is not None and decoding.max_symbols == 1:
            pytest.skip("NeMo adds a frame to every duration")
        weights, config = self.decoder(decoding, load)
        embedding = weights.embedding.clone()
        embedding[config.blank_id] = 0
        weights = replace(weights, embedding=embedding)
        nemo = NemoTransducer(weights, config, "frames")
        num_compared = 0
        for frames, found in self.decoded(decoding, Transducer(weights, config)):
            theirs = nemo.decode(*padded(frames))
            for mine, expected in zip(found, theirs, strict=True):
                at_frame = Counter(frame for _, frame, duration in mine if duration == 0)
                if config.max_symbols - 1 not in at_frame.values():
                    assert mine == expected
                    num_compared += 1
        assert num_compared > BATCHES[decoding.kind]

    def decoder(
        self, decoding: Decoding, load: LoadModel
    ) -> tuple[TransducerWeights, TransducerConfig]:
        return decoding.decoder(load(decoding.kind, blank_bias=decoding.blank_bias))

    def decoded(
        self, decoding: Decoding, ours: Transducer
    ) -> Iterator[tuple[list[Tensor], list[Triples]]]:
        """Frames and our tokens of each batch."""
        with torch.inference_mode():
            for frames in decoding.batches(BATCHES[decoding.kind]):
                yield frames, decode_at(ours, frames)
