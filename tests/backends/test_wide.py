"""One launch for more than eight streams: every stream has the bits of launches of few streams."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megakernel_tts import Sampling
from megakernel_tts.backends import megakernel
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.errors import DeviceError
from megakernel_tts.kernels.wide import compiled_widths, needed_widths
from megakernel_tts.loader import LoadedModel, load_checkpoint
from megakernel_tts.model import random_checkpoint
from megakernel_tts.model.random_checkpoint import Size, write_checkpoint
from megakernel_tts.model.random_released import write_released_checkpoint
from tests.comparison import SIZES, Comparison, fill_positions, shuffle_pages, step_slots
from tests.emulator import EmulatedModule, emulated_kernels

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the emulator")

_NUM_BLOCKS = 6  # the least that hold the rows of the residual
_MAX_POSITIONS = 544
_SPAN_EDGES = (127, 128, 129, 255, 256, 257, 511, 512, 513)  # a span has 128 positions
Codes = list[list[int]]
MakeRig = Callable[[Size, int], "_Rig"]


class _Rig:
    """A kernel for few streams and one for up to `width`, on emulated instructions."""

    def __init__(self, loaded: LoadedModel, width: int) -> None:
        self.narrow_module = EmulatedModule(loaded.config)
        narrow = Comparison(loaded, self.narrow_module, _NUM_BLOCKS)
        kernels = emulated_kernels(self.narrow_module, _NUM_BLOCKS)
        self.module = EmulatedModule(
            loaded.config, num_streams=width, kernels=["prefill_wide"] if width == 32 else ()
        )
        kernels.add_wide(self.module, loaded.config)
        self.text = narrow.text
        self.prompt = narrow.prompt
        self.narrow, self.wide = (
            Megakernel(
                narrow.half.model,
                narrow.config,
                narrow.pad,
                num_slots=width,
                max_positions=_MAX_POSITIONS,
                kernels=one,
            )
            for one in (narrow._kernels, kernels)
        )

    def reset(self) -> None:
        """Drops streams, keys and values of earlier tests, and what they set."""
        for module in (self.narrow_module, self.module):
            module.launched.clear()
            module.schedule_seed = module.late = 0
        for kernel in (self.narrow, self.wide):
            for slot in [*kernel._state]:
                kernel.release(slot)
            buffers = kernel._buffers
            for tensor in (buffers.keys, buffers.values, buffers.prompt_hidden):
                tensor.zero_()

    def begin(self, kernel: Megakernel, slots: Sequence[int]) -> None:
        """Starts streams with prompts of two and three positions."""
        kernel.prefill(
            [
                PrefillRequest(slot, self.prompt[: 2 + slot % 2], Sampling(seed=slot))
                for slot in slots
            ]
        )
        for slot in slots:
            kernel.feed(slot, self.text, True)

    def continue_at(self, kernel: Megakernel, slots: Sequence[int]) -> None:
        """Starts streams, and moves them to positions at the edges of attention spans.

        Each kernel has its own order of pages.
        """
        shuffle_pages(kernel, seed=1 if kernel is self.wide else 2)
        self.begin(kernel, slots)
        step_slots(kernel, slots)
        for slot in slots:
            num_positions = kernel._state[slot].num_prompt = _SPAN_EDGES[slot % len(_SPAN_EDGES)]
            fill_positions(kernel, slot, num_positions)


def _cache_of(kernel: Megakernel, slot: int) -> list[Tensor]:
    """Bits of the talker's keys and values of a slot."""
    return [view.view(torch.int16) for view in kernel._cache.views(slot, _MAX_POSITIONS)]


def _assert_same_caches(one: Megakernel, other: Megakernel, slots: Sequence[int]) -> None:
    for slot in slots:
        views = [*zip(_cache_of(one, slot), _cache_of(other, slot), strict=True)]
        assert views and all(torch.equal(ours, theirs) for ours, theirs in views)


@pytest.fixture(scope="module")
def make_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRig]:
    """Rigs of models with a single layer, since the emulator is slow; each is made once."""
    rigs: dict[tuple[Size, int], _Rig] = {}
    small = random_checkpoint._stack

    @cache
    def load(size: Size) -> LoadedModel:
        folder = tmp_path_factory.mktemp(size)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(random_checkpoint, "_stack", lambda hidden, _: small(hidden, 1))
            write_checkpoint(folder, "custom_voice", size)
        loaded = load_checkpoint(folder, torch.device("cpu"), torch.float32, 4)
        engines.callback(loaded.engine.close)
        return loaded

    def make(size: Size, width: int) -> _Rig:
        if (size, width) not in rigs:
            rigs[size, width] = _Rig(load(size), width)
        rigs[size, width].reset()
        return rigs[size, width]

    with ExitStack() as engines:
        yield make


@pytest.mark.parametrize("size", SIZES)
def test_streams_that_join_and_leave_have_their_own_codes(make_rig: MakeRig, size: Size) -> None:
    """A launch mixes first frames, later frames, and slots in another order."""
    rig = make_rig(size, 16)
    few = [0, 3, 5, 6, 7, 8, 9]
    rig.begin(rig.wide, range(10))
    wide = [step_slots(rig.wide, range(9)), step_slots(rig.wide, [9, 7, 0, 5, 1, 2, 3, 4, 8])]
    assert rig.module.launched == ["generate_wide"] * 2
    rig.begin(rig.narrow, few)
    narrow = [step_slots(rig.narrow, few[:-1]), step_slots(rig.narrow, [0, 3, 5, 7, 8, 9])]
    assert [{slot: codes[slot] for slot in few if slot in codes} for codes in wide] == narrow
    _assert_same_caches(rig.wide, rig.narrow, few)


def test_a_launch_of_33_streams_has_the_codes_of_launches_of_few(make_rig: MakeRig) -> None:
    rig = make_rig("0b6", 64)
    few = [0, 8, 31, 32]
    rig.begin(rig.narrow, few)
    expected = step_slots(rig.narrow, few)
    rig.begin(rig.wide, range(33))
    codes = step_slots(rig.wide, range(33))
    assert rig.module.launched == ["prefill_wide"] * 2 + ["generate_wide"]
    assert {slot: codes[slot] for slot in few} == expected
    _assert_same_caches(rig.wide, rig.narrow, few)


@pytest.mark.parametrize(("width", "few"), [(16, range(1, 9)), (64, (0, 7, 8, 30, 31, 32))])
def test_streams_of_several_spans_have_the_codes_of_launches_of_few(
    make_rig: MakeRig, width: int, few: Sequence[int]
) -> None:
    rig, streams = make_rig("0b6", width), range(max(few) + 1)
    rig.continue_at(rig.wide, streams)
    wide = step_slots(rig.wide, streams)
    free = [*rig.wide._cache._pool._free]
    assert rig.wide._buffers.keys[free].isnan().all(), "a page of no slot was written"
    assert rig.wide._buffers.values[free].isnan().all()
    rig.continue_at(rig.narrow, few)
    assert step_slots(rig.narrow, few) == {slot: wide[slot] for slot in few}
    _assert_same_caches(rig.wide, rig.narrow, few)


def _prompts(rig: _Rig, lengths: Sequence[int], num_common: int = 0) -> list[PrefillRequest]:
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


def _assert_same_prompts(rig: _Rig, requests: Sequence[PrefillRequest]) -> None:
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_common", [0, 9])
def test_wide_batches_of_prompts_have_the_bits_of_narrow_ones(
    make_rig: MakeRig, size: Size, num_common: int
) -> None:
    """Prompts of one to four tiles, of which some end within a batch."""
    rig = make_rig(size, 32)
    lengths = (10, 24, 41, 25) if num_common else (1, 8, 9, 40, 24, 25, 17)
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
    assert step_slots(rig.wide, range(4), 2) == step_slots(rig.narrow, range(4), 2)


def test_wide_batches_of_prompts_of_several_spans_have_the_bits_of_narrow_ones(
    make_rig: MakeRig,
) -> None:
    """Later parts of prompts begin at, and behind, edges of spans."""
    rig = make_rig("0b6", 32)
    begins = (0, 120, 136, 264)  # the first positions of tiles
    requests = [
        replace(request, begin=begin)
        for request, begin in zip(
            _prompts(rig, [begin + 15 for begin in begins]), begins, strict=True
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


def test_wide_batches_of_prompts_do_not_depend_on_schedules(make_rig: MakeRig) -> None:
    rig = make_rig("1b7", 32)
    requests = _prompts(rig, (12, 9, 18))
    shuffle_pages(rig.narrow, seed=0)
    rig.narrow.prefill(requests)
    for rig.module.schedule_seed, rig.module.late in ((1, 0), (2, 0), (0, 2000)):
        rig.wide._buffers.prompt_hidden.zero_()
        shuffle_pages(rig.wide, seed=0)
        rig.wide.prefill(requests)
        _assert_same_prompts(rig, requests)
        for request in requests:
            rig.wide.release(request.slot)
    assert rig.module.epoch_violations() == 0


def test_a_lost_wide_batch_of_prompts_starts_no_stream(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch times out, or an earlier one did and the host has not seen it."""
    rig = make_rig("0b6", 32)
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
        (32, (8, 9), 0),  # two batches in either case
        (32, (40,), 0),  # the tiles of one prompt cannot share a batch
        (32, (8, 8, 1), 1),
        (16, (8, 8, 1), 0),
    ],
)
def test_wide_batches_of_prompts_are_used_if_they_are_fewer(
    make_rig: MakeRig, width: int, lengths: Sequence[int], num_wide: int
) -> None:
    rig = make_rig("0b6", width)
    rig.wide.prefill(_prompts(rig, lengths))
    assert rig.module.launched == ["prefill_wide"] * num_wide
    assert bool(rig.narrow_module.launched) == (num_wide == 0)


def test_a_prefill_after_a_launch_of_many_streams_does_not_copy_them(make_rig: MakeRig) -> None:
    """Shared memory of the kernel for eight columns of prompts has no room for 64 streams."""
    rig = make_rig("0b6", 16)
    kernel, states = rig.narrow, []
    for num_streams in (1, 64):
        kernel._buffers.params.num_streams = num_streams  # of the launch before
        kernel.prefill([PrefillRequest(0, rig.prompt[:8], Sampling(seed=0))])
        parts = [*_cache_of(kernel, 0), kernel._buffers.prompt_hidden]
        states.append([tensor.clone() for tensor in parts])
    assert rig.narrow_module.launched == ["prefill_medium"] * 2
    assert all(map(torch.equal, *states))


@pytest.mark.parametrize("size", SIZES)
def test_schedules_change_neither_codes_nor_epochs(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, size: Size
) -> None:
    monkeypatch.setattr(megakernel, "_TIMEOUT_NS", 1_000_000)  # readings of the emulated clock
    rig = make_rig(size, 16)
    codes = []
    for rig.module.schedule_seed, rig.module.late in ((0, 0), (1, 0), (0, 2000)):
        rig.begin(rig.wide, range(9))
        codes.append(step_slots(rig.wide, range(9)))
        for slot in range(9):
            rig.wide.release(slot)
    assert codes[1:] == codes[:1] * 2
    assert rig.module.epoch_violations() == 0


def test_a_wait_that_times_out_ends_the_launch(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("0b6", 16)
    rig.begin(rig.wide, range(9))
    with monkeypatch.context() as patched:
        patched.setattr(megakernel, "_TIMEOUT_NS", 0)
        with pytest.raises(DeviceError, match=r"thread block \d+ waited"):
            rig.wide.step(range(9), 1)
    rig.begin(rig.wide, range(9))
    assert all(len(codes) == 1 for codes in step_slots(rig.wide, range(9)).values())


@pytest.mark.parametrize(
    ("architecture", "num_streams", "widths"),
    [
        ("90a", 8, ()),
        ("90a", 9, (16,)),
        ("90a", 16, (16,)),
        ("90a", 33, (16, 32, 64)),
        ("90a", 200, (16, 32, 64)),
        ("86", 200, (16, 32)),
        ("80", 200, (16,)),
        ("75", 200, (16,)),
    ],
)
def test_the_kernels_that_the_slots_need_are_loaded(
    architecture: str, num_streams: int, widths: tuple[int, ...]
) -> None:
    assert needed_widths(architecture, num_streams, 8) == widths
    assert {*widths} <= {*compiled_widths(architecture)}


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "hidden"), [("0.6B", 1024), ("1.7B", 2048)])
def test_batches_of_a_released_size_have_the_codes_of_launches_of_few(
    tmp_path: Path, size: str, hidden: int
) -> None:
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
        for count in (2, 8, 9, 16, 33, 64):
            slots = range(64 - count, 64)
            for _ in range(3):
                assert generate(slots) == {slot: solo[slot] for slot in slots}
        assert generate([0]) == {0: solo[0]}  # a prefill of few columns behind a launch of 64
        begin(range(64))
        made: dict[int, Codes] = {slot: [] for slot in range(64)}
        for step in range(12):  # groups of eight streams join and leave one after another
            active = [s for s in range(64) if s // 8 <= step < s // 8 + 4]
            for slot, codes in step_slots(kernel, active, 2).items():
                made[slot] += codes
        for slot, codes in made.items():
            assert codes == solo[slot][: len(codes)]
