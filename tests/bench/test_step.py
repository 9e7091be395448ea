"""The step's table: every weight is counted as often as it is read, and its figures add up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.step import Phases, frame_bytes, stack_bytes, table
from megakernel_tts.backends.megakernel import PHASES
from megakernel_tts.model.checkpoint import leaves, map_leaves
from megakernel_tts.model.config import read_model_config
from megakernel_tts.model.weights import model_specs


def _matrices(part: Any) -> int:
    return sum(2 * t.numel() for t in leaves(part) if t.dim() == 2)


@pytest.mark.parametrize("size", ["0b6", "1b7"])
def test_a_frame_reads_every_matrix_once_a_pass(checkpoint: Callable[..., Path], size: str) -> None:
    def empty(spec: Any) -> Tensor:
        return torch.empty(spec.shape, dtype=torch.bfloat16, device="meta")

    config = read_model_config(checkpoint("custom_voice", size) / "config.json")
    model = map_leaves(model_specs(config), empty)
    talker, predictor = model.talker, model.predictor
    once = _matrices(talker) + _matrices(predictor.heads)
    again = _matrices(predictor.stack) + _matrices(predictor.project or ())
    assert set(frame_bytes(model, 15)) <= set(PHASES)
    assert sum(stack_bytes(talker.stack).values()) == _matrices(talker.stack)
    for passes in (15, 16):
        assert sum(frame_bytes(model, passes).values()) == once + passes * again


def test_a_phase_has_its_bytes_by_its_whole_time() -> None:
    times = {"wait": 5.0, "multiply": 3.0, "rest": 2.0}
    phases: Phases = dict.fromkeys(PHASES, times)
    found: Any = table(phases, {"qkv": 20_000_000, "out": 10_000_000}, bandwidth=4e12)
    assert found["qkv"] == times | {"mb": 20.0, "gb_s": 2000, "share_of_read_bandwidth": 0.5}
    assert found["sample"] == times | {"mb": 0.0, "gb_s": 0, "share_of_read_bandwidth": 0.0}
    assert [found["all"][part] for part in times] == [9 * time for time in times.values()]
    assert found["all"]["mb"] == 30.0
    assert found["all"]["gb_s"] == round(30_000_000 / 90 / 1e3)
