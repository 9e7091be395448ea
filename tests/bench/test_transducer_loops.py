"""The transducer's loop as a WHILE node gives the tokens of the loop in one launch."""

from dataclasses import replace

import pytest
import torch

from megakernel_stt.kernels.transducer import load_transducer
from megakernel_stt.model.random_checkpoint import RELEASED_SIZE, random_model


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_both_loops_give_the_same_tokens_and_states(batch: int) -> None:
    pytest.importorskip("cuda.bindings")
    from bench.transducer_loops import compare, load_rounds

    device = torch.device("cuda")
    size = replace(RELEASED_SIZE, hidden_size=64, num_layers=1, vocab_size=1025)
    with torch.inference_mode():
        model = random_model("streaming", size, device, torch.bfloat16)
        weights, config = model.weights.transducer, model.config.transducer
        frames = torch.randn(batch, 20, 64, device=device).to(weights.embedding.dtype)
        decoders = {
            "launch": load_transducer(weights, config),
            "while_node": load_rounds(weights, config),
        }
        row = compare(decoders, frames, repeats=2)
    assert isinstance(row["tokens"], int) and row["tokens"] > 0
