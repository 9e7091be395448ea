"""The exchange protocol of csrc/exchange.cuh under random schedules of thread blocks and warps.

The emulator counts polls that find a value of another use than the last or the current one. Such a
poll means that a thread block has overwritten a value before it was read, or that one has run ahead
of the others.
"""

import pytest
import torch

from megakernel_tts.backends import megakernel
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.model.random_checkpoint import Size
from tests.comparison import SAMPLINGS, Comparison, MakeComparison
from tests.rig import one_frame

_NUM_BLOCKS = 5


def _codes(b: Comparison, num_streams: int) -> list[list[int] | None]:
    """Codes of the first frame of streams with prompts of different lengths, [streams, codes]."""
    b.kernel.prefill(
        [
            PrefillRequest(slot, b.prompt.repeat(3, 1)[slot:].contiguous(), SAMPLINGS[slot])
            for slot in range(num_streams)
        ]
    )
    slots = range(num_streams)
    for slot in slots:
        b.kernel.feed(slot, b.text, True)
    codes = [None if c is None else c.tolist() for c in one_frame(b.kernel, list(slots))]
    for slot in slots:
        b.kernel.release(slot)
    return codes


@pytest.mark.parametrize(("num_streams", "size"), [(1, "0b6"), (3, "0b6"), (3, "1b7")])
def test_schedules_change_neither_codes_nor_epochs(
    comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch, num_streams: int, size: Size
) -> None:
    monkeypatch.setattr(megakernel, "_TIMEOUT_NS", 1_000_000)  # readings of the emulated clock
    b = comparison(size, blocks=_NUM_BLOCKS, shallow=True)
    assert b.module is not None
    codes = []
    for b.module.schedule_seed, b.module.late in ((1, 0), (2, 2000)):
        codes.append(_codes(b, num_streams))
    assert codes[0] == codes[1]
    assert b.module.epoch_violations() == 0


def test_prompts_of_different_lengths_in_one_call_do_not_change_each_other(
    comparison: MakeComparison,
) -> None:
    b = comparison("0b6", blocks=_NUM_BLOCKS, shallow=True)
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
