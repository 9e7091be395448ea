"""The table of `bench.step`: bytes per phase, and the arithmetic of its rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.step import PhaseTimes, frame_bytes, phase_table, stack_bytes
from megakernel_common.checkpoint import leaves, map_leaves
from megakernel_tts.backends.megakernel import PHASES
from megakernel_tts.model.config import read_model_config
from megakernel_tts.model.weights import model_specs


def matrix_bytes(weights: Any) -> int:
    """Bytes of all matrices of some bfloat16 weights."""
    return sum(2 * tensor.numel() for tensor in leaves(weights) if tensor.dim() == 2)


@pytest.mark.parametrize("size", ["0b6", "1b7"])
def test_frame_counts_every_matrix_once_per_pass(
    checkpoint: Callable[..., Path], size: str
) -> None:
    def empty(spec: Any) -> Tensor:
        return torch.empty(spec.shape, dtype=torch.bfloat16, device="meta")

    config = read_model_config(checkpoint("custom_voice", size) / "config.json")
    model = map_leaves(model_specs(config), empty)
    talker, predictor = model.talker, model.predictor
    per_frame = matrix_bytes(talker) + matrix_bytes(predictor.heads)
    per_pass = matrix_bytes(predictor.stack) + matrix_bytes(predictor.project or ())
    assert set(frame_bytes(model, 15)) <= set(PHASES)
    assert sum(stack_bytes(talker.stack).values()) == matrix_bytes(talker.stack)
    for num_passes in (15, 16):
        assert sum(frame_bytes(model, num_passes).values()) == per_frame + num_passes * per_pass


def test_read_rate_divides_bytes_by_the_whole_time_of_a_phase() -> None:
    times_us = {"wait": 5.0, "multiply": 3.0, "rest": 2.0}
    phases: PhaseTimes = dict.fromkeys(PHASES, times_us)
    rows: Any = phase_table(phases, {"qkv": 20_000_000, "out": 10_000_000}, bandwidth=4e12)
    assert rows["qkv"] == times_us | {"mb": 20.0, "gb_s": 2000, "share_of_read_bandwidth": 0.5}
    assert rows["sample"] == times_us | {"mb": 0.0, "gb_s": 0, "share_of_read_bandwidth": 0.0}
    assert [rows["total"][part] for part in times_us] == [9 * time for time in times_us.values()]
    assert rows["total"]["mb"] == 30.0
    assert rows["total"]["gb_s"] == round(30_000_000 / 90 / 1e3)
