"""Wide batches of prompts: every prompt has the bits of narrow batches."""

import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megakernel_tts import Sampling
from megakernel_tts.backends import megakernel
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.loader import load_checkpoint
from megakernel_tts.model.random_checkpoint import Size
from megakernel_tts.model.random_released import write_released_checkpoint
from tests.comparison import fill_positions, shuffle_pages, step_slots
from tests.wide_rig import MakeWideRig, WideRig

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the emulator")

_TWO_LAYERS = 2  # the second has keys and values of the first one's attention
_FOUR_LAYERS = 4  # the first and the last have the same epoch tags


def _prompts(rig: WideRig, lengths: Sequence[int], num_common: int = 0) -> list[PrefillRequest]:
    """A random prompt for each slot; the first positions of all are the same."""
    generator = torch.Generator().manual_seed(0)
    hidden_size = rig.prompt.shape[1]
    common = torch.randn(num_common, hidden_size, generator=generator)
    return [
        PrefillRequest(
            slot,
            torch.cat([common, torch.randn(length - num_common, hidden_size, generator=generator)])
            .bfloat16()
            .contiguous(),
            Sampling(seed=slot),
            num_common=num_common,
        )
        for slot, length in enumerate(lengths)
    ]


def _assert_same_prompts(rig: WideRig, requests: Sequence[PrefillRequest]) -> None:
    """Checks that both kernels have left the same bits of prompts: caches and hidden states."""
    hidden = [kernel._buffers.prompt_hidden[: len(requests)] for kernel in (rig.wide, rig.narrow)]
    assert hidden[0].isfinite().all() and hidden[0].any(dim=1).all()
    assert torch.equal(*(states.view(torch.int32) for states in hidden))
    for request in requests:
        caches = (
            kernel._cache.views(request.slot, request.num_positions)
            for kernel in (rig.wide, rig.narrow)
        )
        views = [*zip(*caches, strict=True)]
        assert views and all(
            torch.equal(ours.view(torch.int16), theirs.view(torch.int16)) for ours, theirs in views
        )


def test_a_prompt_alone_has_the_bits_of_narrow_batches(make_wide_rig: MakeWideRig) -> None:
    """Its tiles share a batch; the prompts end at edges of tiles, and behind them."""
    rig = make_wide_rig("0b6", 64, _TWO_LAYERS)
    requests = _prompts(rig, (9, 25, 40, 70))
    for kernel, seed in ((rig.wide, 1), (rig.narrow, 2)):
        shuffle_pages(kernel, seed)
        for request in requests:
            kernel.prefill([request])
    assert rig.module.launched == ["prefill_wide"] * (len(requests) + 1)  # 70 are two batches
    _assert_same_prompts(rig, requests)


@pytest.mark.parametrize(("size", "num_common"), [("1b7", 0), ("0b6", 9)])
def test_wide_batches_of_prompts_have_the_bits_of_narrow_ones(
    make_wide_rig: MakeWideRig, size: Size, num_common: int
) -> None:
    """Prompts of one to four tiles, some of which share a batch; some end within one."""
    rig = make_wide_rig(size, 32, _TWO_LAYERS)
    lengths = (10, 24, 33, 25) if num_common else (1, 8, 9, 24, 25)
    requests = _prompts(rig, lengths, num_common)
    for kernel, seed in ((rig.wide, 1), (rig.narrow, 2)):
        shuffle_pages(kernel, seed)
        kernel._buffers.seen_codes.fill_(1)
        kernel.prefill(requests)
    assert {*rig.module.launched} == {"prefill_wide"}
    assert "prefill_large" in rig.narrow_module.launched
    _assert_same_prompts(rig, requests)
    assert torch.equal(rig.wide._buffers.seen_codes, rig.narrow._buffers.seen_codes)
    assert not rig.wide._buffers.seen_codes[: len(requests)].any()
    for kernel in (rig.wide, rig.narrow):
        for request in requests:
            kernel.feed(request.slot, rig.text, True)
    assert step_slots(rig.wide, range(4)) == step_slots(rig.narrow, range(4))


def test_wide_batches_of_prompts_of_several_spans_have_the_bits_of_narrow_ones(
    make_wide_rig: MakeWideRig,
) -> None:
    """Later chunks of prompts begin before, at, and behind edges of spans; each has three tiles."""
    rig = make_wide_rig("0b6", 64, _TWO_LAYERS)
    begins = (0, 120, 136, 264)  # the first positions of tiles
    requests = [
        replace(request, begin=begin)
        for request, begin in zip(
            _prompts(rig, [begin + 40 for begin in begins]), begins, strict=True
        )
    ]
    for kernel, seed in ((rig.wide, 1), (rig.narrow, 2)):
        shuffle_pages(kernel, seed)
        for request in requests:
            assert kernel.reserve(request.slot, request.num_positions)
            if request.begin:
                fill_positions(kernel, request.slot, request.begin)
        kernel.prefill(requests)
    assert rig.module.launched == ["prefill_wide"] * 3
    _assert_same_prompts(rig, requests)


@pytest.mark.parametrize(("size", "lengths"), [("1b7", (26,)), ("0b6", (12, 9, 17))])
def test_wide_batches_of_prompts_do_not_depend_on_schedules(
    make_wide_rig: MakeWideRig, size: Size, lengths: Sequence[int]
) -> None:
    rig = make_wide_rig(size, 32, _FOUR_LAYERS)
    requests = _prompts(rig, lengths)
    shuffle_pages(rig.narrow, seed=0)
    rig.narrow.prefill(requests)
    for rig.module.schedule_seed, rig.module.late in ((1, 0), (2, 2000)):
        rig.wide._buffers.prompt_hidden.zero_()
        shuffle_pages(rig.wide, seed=0)
        rig.wide.prefill(requests)
        _assert_same_prompts(rig, requests)
        for request in requests:
            rig.wide.release(request.slot)
    assert rig.module.epoch_violations() == 0


def test_a_lost_wide_batch_of_prompts_starts_no_stream(
    make_wide_rig: MakeWideRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch times out, or an earlier one did and the host has not seen it."""
    rig = make_wide_rig("0b6", 32)
    requests = _prompts(rig, (12, 9, 18))
    hidden = rig.wide._buffers.prompt_hidden
    with monkeypatch.context() as patched:
        patched.setattr(megakernel, "_TIMEOUT_NS", 0)
        rig.wide.prefill(requests)
    assert rig.wide._buffers.failure[0] and hidden[: len(requests)].isnan().all()
    hidden.zero_()
    rig.wide.prefill(requests)
    assert hidden[: len(requests)].isnan().all()
    rig.wide._buffers.failure[:] = 0
    rig.wide.prefill(requests)
    assert hidden[: len(requests)].isfinite().all()


@pytest.mark.parametrize(
    ("width", "lengths", "num_wide"),
    [
        (32, (8, 8), 0),
        (32, (8, 9), 1),
        (32, (9,), 1),  # tiles of one prompt share a batch
        (32, (40,), 2),
        (32, (8, 8, 1), 1),
        (16, (8, 8, 1), 0),
    ],
)
def test_wide_batches_of_prompts_are_used_if_they_are_fewer(
    make_wide_rig: MakeWideRig, width: int, lengths: Sequence[int], num_wide: int
) -> None:
    rig = make_wide_rig("1b7", width)
    rig.wide.prefill(_prompts(rig, lengths))
    assert rig.module.launched == ["prefill_wide"] * num_wide
    assert bool(rig.narrow_module.launched) == (num_wide == 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "hidden"), [("0.6B", 1024), ("1.7B", 2048)])
def test_prompts_of_a_released_size_have_the_codes_of_narrow_batches(
    tmp_path: Path, size: str, hidden: int
) -> None:
    cuda, lengths = torch.device("cuda"), (9, 12, 24, 35, 40, 63, 64, 70, 150)
    write_released_checkpoint(tmp_path, size, cuda)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randn(n, hidden, generator=generator).bfloat16() for n in lengths]

    def generate(num_slots: int, repetitions: int) -> list[list[list[list[int]]]]:
        """Codes [repetitions, prompts, frames, groups]."""
        made: list[list[list[list[int]]]] = []
        with closing(load_checkpoint(tmp_path, cuda, torch.bfloat16, num_slots).engine) as engine:
            kernel = engine.backend
            assert isinstance(kernel, Megakernel)
            for _ in range(repetitions):
                made.append([])
                for prompt in prompts:
                    kernel.prefill([PrefillRequest(0, prompt, Sampling(seed=0))])
                    kernel.feed(0, prompt, True)
                    made[-1].append(step_slots(kernel, [0], 4)[0])
                    kernel.release(0)
        return made

    narrow = generate(8, 1)  # no wide kernel for eight slots takes prompts
    assert generate(64, 20) == narrow * 20
