"""The transducer's loop as a WHILE node gives the tokens of the loop in one launch."""

import pytest
import torch

from bench.recognition import decoder_inputs
from megakernel_stt.kernels.transducer import load_transducer


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_both_loops_give_the_same_tokens_and_states(batch: int) -> None:
    pytest.importorskip("cuda.bindings")
    from bench.transducer_loops import compare, load_rounds

    with torch.inference_mode():
        # The bias of blank is found on 64 streams: on one of few frames no bias may give tokens.
        weights, config, frames, _ = decoder_inputs(1025, 64, 50, torch.bfloat16)
        decoders = {
            "launch": load_transducer(weights, config),
            "while_node": load_rounds(weights, config),
        }
        row = compare(decoders, frames[:batch], repeats=2)  # raises if they differ
    assert isinstance(row["tokens"], int) and row["tokens"] > 0
