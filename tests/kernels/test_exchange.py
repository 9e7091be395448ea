"""The exchange protocol of csrc/exchange.cuh under random schedules of thread blocks and warps.

The emulator counts polls that find a value of another use than the last or the current one. Such a
poll means that a thread block has overwritten a value before it was read, or that one has run ahead
of the others.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.loader import load_checkpoint
from megakernel_tts.model import random_checkpoint
from megakernel_tts.model.random_checkpoint import write_checkpoint
from tests.comparison import SAMPLINGS, Comparison, MakeComparison
from tests.emulator import EmulatedModule
from tests.rig import one_frame

_NUM_BLOCKS = 5


def _codes(b: Comparison, num_streams: int, num_frames: int) -> list[list[list[int] | None]]:
    """Codes of streams with prompts of different lengths, [frames, streams, codes]."""
    b.kernel.prefill(
        [
            PrefillRequest(slot, b.prompt.repeat(3, 1)[slot:].contiguous(), SAMPLINGS[slot])
            for slot in range(num_streams)
        ]
    )
    slots = range(num_streams)
    for slot in slots:
        b.kernel.feed(slot, b.text, True)
    frames = [one_frame(b.kernel, list(slots)) for _ in range(num_frames)]
    codes = [[None if c is None else c.tolist() for c in frame] for frame in frames]
    for slot in slots:
        b.kernel.release(slot)
    return codes


@pytest.mark.parametrize("num_streams", [1, 3])
def test_schedules_change_neither_codes_nor_epochs(
    comparison: MakeComparison, num_streams: int
) -> None:
    b = comparison("1b7", blocks=_NUM_BLOCKS)  # it has an input projection
    assert b.module is not None
    run = partial(_codes, b, num_streams, num_frames=1)
    expected, before = run(), b.module.epoch_violations()
    for seed in (1, 2):
        b.module.schedule_seed = seed
        assert run() == expected
    b.module.schedule_seed, b.module.late = 0, 2000
    assert run() == expected
    assert b.module.epoch_violations() == before == 0


@pytest.fixture
def two_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Comparison]:
    """A model whose number of layers is no multiple of the three epoch tags."""
    small = random_checkpoint._stack
    monkeypatch.setattr(random_checkpoint, "_stack", lambda hidden, _: small(hidden, 2))
    write_checkpoint(tmp_path / "model", "custom_voice", "0b6")
    loaded = load_checkpoint(tmp_path / "model", torch.device("cpu"), torch.float32, 4)
    yield Comparison(loaded, EmulatedModule(loaded.config), _NUM_BLOCKS)
    loaded.engine.close()


def test_prompts_of_different_lengths_in_one_call_do_not_change_each_other(
    two_layers: Comparison,
) -> None:
    b = two_layers
    assert b.module is not None
    kernel = Megakernel(
        b.half.model, b.config, b.pad, num_slots=2, max_positions=256, kernels=b._kernels
    )
    generator = torch.Generator().manual_seed(0)
    hidden_size = b.config.talker.stack.hidden_size
    # Behind their cached prefixes, the prompts take turns in the same columns, with two spans of
    # earlier positions and with one.
    requests = [
        PrefillRequest(
            slot,
            torch.randn(num_common + 32, hidden_size, generator=generator).to(torch.bfloat16),
            SAMPLINGS[slot],
            num_common=num_common,
        )
        for slot, num_common in enumerate((136, 8))
    ]
    for request in requests:
        kernel.prefill([request])
    expected = kernel._buffers.prompt_hidden.clone()
    for b.module.schedule_seed in range(2):
        for request in requests:
            kernel.release(request.slot)
        kernel.prefill(requests)
        assert torch.equal(kernel._buffers.prompt_hidden, expected)
