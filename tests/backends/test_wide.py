"""One launch for up to 64 streams: every stream has the bits of launches of few streams."""

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megakernel_tts import Sampling
from megakernel_tts.backends import megakernel
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.errors import DeviceError
from megakernel_tts.kernels.wide import narrow_limit, needed_widths
from megakernel_tts.loader import load_checkpoint
from megakernel_tts.model.random_checkpoint import Size
from megakernel_tts.model.random_released import write_released_checkpoint
from tests.comparison import SIZES, step_slots
from tests.wide_rig import MakeWideRig, assert_same_caches, cache_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the emulator")

Codes = list[list[int]]


def test_streams_that_join_and_leave_have_their_own_codes(make_wide_rig: MakeWideRig) -> None:
    """A launch mixes first frames, later frames, and slots in another order."""
    rig = make_wide_rig("1b7", 16)  # with an input projection
    few = [0, 3, 5, 6, 7, 8, 9]
    rig.begin(rig.wide, range(10))
    wide = [step_slots(rig.wide, range(9)), step_slots(rig.wide, [9, 7, 0, 5, 1, 2, 3, 4, 8])]
    assert rig.module.launched == ["generate_wide"] * 2
    rig.begin(rig.narrow, few)
    narrow = [step_slots(rig.narrow, few[:-1]), step_slots(rig.narrow, [0, 3, 5, 7, 8, 9])]
    assert [{slot: codes[slot] for slot in few if slot in codes} for codes in wide] == narrow
    assert_same_caches(rig.wide, rig.narrow, few)


@pytest.mark.parametrize(
    ("size", "width", "few", "num_prefills"),
    [
        ("1b7", 8, (0, 1, 5, 6, 7), 0),
        ("1b7", 16, range(1, 9), 0),
        ("0b6", 48, (0, 15, 16, 38, 39, 40), 3),
        ("0b6", 64, (0, 7, 8, 30, 31, 32), 2),
    ],
)
def test_streams_of_several_spans_have_the_codes_of_launches_of_few(
    make_wide_rig: MakeWideRig, size: Size, width: int, few: Sequence[int], num_prefills: int
) -> None:
    """First frames, and frames at the edges of spans."""
    rig, streams = make_wide_rig(size, width), range(max(few) + 1)
    first = rig.continue_at(rig.wide, streams)
    wide = step_slots(rig.wide, streams)
    assert rig.module.launched == num_prefills * ["prefill_wide"] + 2 * ["generate_wide"]
    free = [*rig.wide._cache._pool._free]
    assert rig.wide._buffers.keys[free].isnan().all(), "a page of no slot was written"
    assert rig.wide._buffers.values[free].isnan().all()
    assert rig.continue_at(rig.narrow, few) == {slot: first[slot] for slot in few}
    assert step_slots(rig.narrow, few) == {slot: wide[slot] for slot in few}
    assert_same_caches(rig.wide, rig.narrow, few)


@pytest.mark.parametrize(
    ("size", "width", "few"), [("1b7", 16, range(1, 9)), ("0b6", 64, (0, 7, 8, 31, 32))]
)
def test_captured_scores_are_those_of_launches_of_few(
    make_wide_rig: MakeWideRig, size: Size, width: int, few: Sequence[int]
) -> None:
    """And capture changes no code."""
    rig, streams = make_wide_rig(size, width), range(max(few) + 1)
    first = rig.continue_at(rig.wide, streams)
    plain = step_slots(rig.wide, streams)
    narrow, wide = rig.with_capture([(0, 3), (0, 0)])
    scores: list[list[Tensor]] = []
    for kernel, slots in ((wide, streams), (narrow, few)):
        assert rig.continue_at(kernel, slots) == {slot: first[slot] for slot in slots}
        frames = dict(zip(slots, kernel.step(slots, 1), strict=True))
        for slot in slots:
            assert frames[slot].codes.tolist() == plain[slot]
        captured = [frames[slot].scores for slot in few]
        scores.append([found for found in captured if found is not None])
    assert len(scores[0]) == len(scores[1]) == len(few)
    for ours, theirs in zip(*scores, strict=True):
        assert ours.shape[1] == 2 and not ours[:, :, 0].isnan().any()
        assert torch.equal(ours.nan_to_num(9e9), theirs.nan_to_num(9e9))


def test_a_prefill_after_a_launch_of_many_streams_does_not_copy_them(
    make_wide_rig: MakeWideRig,
) -> None:
    """Shared memory of the kernel for eight columns of prompts has no room for 64 streams."""
    rig = make_wide_rig("1b7", 16)
    kernel, states = rig.narrow, []
    for num_streams in (1, 64):
        kernel._buffers.params.num_streams = num_streams  # of the launch before
        kernel.prefill([PrefillRequest(0, rig.prompt[:8], Sampling(seed=0))])
        parts = [*cache_of(kernel, 0), kernel._buffers.prompt_hidden]
        states.append([tensor.clone() for tensor in parts])
    assert rig.narrow_module.launched == ["prefill_medium"] * 2
    assert all(map(torch.equal, *states))


@pytest.mark.parametrize(("width", "count"), [(8, 5), (16, 9)])
@pytest.mark.parametrize("size", SIZES)  # only the larger one has an input projection
def test_schedules_change_neither_codes_nor_epochs(
    make_wide_rig: MakeWideRig,
    monkeypatch: pytest.MonkeyPatch,
    size: Size,
    width: int,
    count: int,
) -> None:
    monkeypatch.setattr(megakernel, "_TIMEOUT_NS", 1_000_000)  # readings of the emulated clock
    rig, slots = make_wide_rig(size, width), range(count)
    codes = []
    for rig.module.schedule_seed, rig.module.late in ((1, 0), (2, 2000)):
        rig.begin(rig.wide, slots)
        codes.append(step_slots(rig.wide, slots))
        for slot in slots:
            rig.wide.release(slot)
    assert codes[0] == codes[1]
    assert rig.module.epoch_violations() == 0


@pytest.mark.parametrize(
    ("size", "width", "count"), [("1b7", 8, 5), ("1b7", 16, 9), ("0b6", 64, 64)]
)
def test_a_wait_that_times_out_ends_the_launch(
    make_wide_rig: MakeWideRig,
    monkeypatch: pytest.MonkeyPatch,
    size: Size,
    width: int,
    count: int,
) -> None:
    rig, slots = make_wide_rig(size, width), range(count)
    rig.begin(rig.wide, slots)
    with monkeypatch.context() as patched:
        patched.setattr(megakernel, "_TIMEOUT_NS", 0)
        with pytest.raises(DeviceError, match=r"thread block \d+ waited"):
            rig.wide.step(slots, 1)
    rig.begin(rig.wide, slots)
    assert all(len(codes) == 1 for codes in step_slots(rig.wide, slots).values())


@pytest.mark.parametrize(
    ("architecture", "num_streams", "widths"),
    [
        ("90a", 4, ()),
        ("90a", 5, (8,)),
        ("90a", 8, (8,)),
        ("90a", 9, (8, 16)),
        ("90a", 33, (8, 16, 32, 48)),
        ("90a", 200, (8, 16, 32, 48, 64)),
        ("100a", 200, (8, 16, 32, 64)),
        ("86", 200, (8, 16, 32)),
        ("80", 200, (8, 16)),
        ("75", 200, (8, 16)),
    ],
)
def test_the_kernels_that_the_slots_need_are_loaded(
    architecture: str, num_streams: int, widths: tuple[int, ...]
) -> None:
    assert needed_widths(architecture, num_streams, 8) == widths


def test_up_to_four_streams_take_the_kernels_for_few(make_wide_rig: MakeWideRig) -> None:
    """Where a wide kernel takes as few streams as they do, which is faster for five and more."""
    rig, codes = make_wide_rig("1b7", 8), []
    for kernel in (rig.wide, rig.narrow):
        rig.begin(kernel, range(8))
        codes.append([step_slots(kernel, range(count)) for count in (5, 8, 4, 1, 5)])
    assert codes[0] == codes[1]
    assert rig.module.launched == ["generate_wide"] * 3
    of_few = [kernel for kernel in rig.narrow_module.launched if kernel.startswith("generate")]
    assert of_few[:2] == ["generate_streams", "generate_single"]


@pytest.mark.parametrize(
    ("widths", "capacity", "limit"),
    [([], 8, 8), ([16], 8, 8), ([16], 4, 4), ([8], 8, 4), ([8, 16], 4, 4), ([8, 16], 8, 4)],
)
def test_a_wide_kernel_of_as_few_streams_limits_the_kernels_for_few(
    widths: list[int], capacity: int, limit: int
) -> None:
    assert narrow_limit(widths, capacity) == limit


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "hidden"), [("0.6B", 1024), ("1.7B", 2048)])
def test_batches_of_a_released_size_have_the_codes_of_launches_of_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, hidden: int
) -> None:
    """Also after a launch of 64 streams that timed out."""
    cuda, num_slots, num_frames = torch.device("cuda"), 64, 8
    write_released_checkpoint(tmp_path, size, cuda)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randn(5 + i % 7, hidden, generator=generator).bfloat16() for i in range(64)]
    with closing(load_checkpoint(tmp_path, cuda, torch.bfloat16, num_slots).engine) as engine:
        kernel = engine.backend
        assert isinstance(kernel, Megakernel)

        def begin(slots: Sequence[int]) -> None:
            kernel.prefill(
                [PrefillRequest(slot, prompts[slot], Sampling(seed=slot)) for slot in slots]
            )
            for slot in slots:
                kernel.feed(slot, prompts[slot], True)

        def generate(slots: Sequence[int]) -> dict[int, Codes]:
            begin(slots)
            codes = step_slots(kernel, slots, num_frames)
            for slot in slots:
                kernel.release(slot)
            return codes

        solo = {slot: codes for slot in range(64) for codes in generate([slot]).values()}
        for count in (2, 4, 5, 8, 9, 16, 17, 32, 33, 48, 49, 64):
            slots = range(64 - count, 64)
            for _ in range(3):
                assert generate(slots) == {slot: solo[slot] for slot in slots}
        assert generate([0]) == {0: solo[0]}  # a prefill of few columns behind a launch of 64
        begin(range(64))
        with monkeypatch.context() as patched:
            patched.setattr(megakernel, "_TIMEOUT_NS", 0)
            with pytest.raises(DeviceError, match=r"thread block \d+ waited"):
                kernel.step(range(64), 1)
        assert generate(range(64)) == solo
        begin(range(64))
        made: dict[int, Codes] = {slot: [] for slot in range(64)}
        for step in range(12):  # groups of eight streams join and leave one after another
            active = [s for s in range(64) if s // 8 <= step < s // 8 + 4]
            for slot, codes in step_slots(kernel, active, 2).items():
                made[slot] += codes
        for slot, codes in made.items():
            assert codes == solo[slot][: len(codes)]
