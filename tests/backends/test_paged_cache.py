"""The talker's KV cache in pages: results depend neither on the pages nor on their past."""

import random
import shutil
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from tests.comparison import (
    Comparison,
    MakeComparison,
    fill_positions,
    shuffle_pages,
    step_slots,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the emulator")

_MAX_POSITIONS = 320  # three pages of 128
_EDGES = (126, 127, 128, 255, 5)  # a stream makes two frames from here on
Codes = list[list[int]]


def _kernel(b: Comparison, num_slots: int, cache_positions: int | None = None) -> Megakernel:
    return Megakernel(
        b.half.model,
        b.config,
        b.pad,
        num_slots=num_slots,
        max_positions=_MAX_POSITIONS,
        cache_positions=cache_positions,
        kernels=b._kernels,
    )


def _begin(b: Comparison, kernel: Megakernel, slots: Sequence[int]) -> None:
    kernel.prefill(
        [
            PrefillRequest(slot, b.prompt[slot % 3 :].contiguous(), Sampling(seed=slot))
            for slot in slots
        ]
    )
    for slot in slots:
        kernel.feed(slot, b.text, True)


def _continue_at(kernel: Megakernel, slot: int, num_positions: int) -> None:
    """Moves a stream to a position, behind random keys and values."""
    kernel._state[slot].num_prompt = num_positions - kernel._state[slot].num_frames + 1
    fill_positions(kernel, slot, num_positions)


def _keys_of(kernel: Megakernel, slot: int) -> Tensor:
    """Bits of the keys of a slot, [positions, layers, kv heads, width]."""
    num_positions = kernel._state[slot].num_positions
    keys = kernel._cache.views(slot, num_positions)[::2]
    return torch.cat([page.movedim(2, 0).view(torch.int16) for page in keys])


def _speech_at_edges(b: Comparison, kernel: Megakernel, slots: Sequence[int]) -> list[object]:
    """Codes and keys of streams that cross from page to page."""
    _begin(b, kernel, slots)
    step_slots(kernel, slots)
    for slot in slots:
        _continue_at(kernel, slot, _EDGES[slot])
    codes = step_slots(kernel, slots, 2)
    assert any(len(kernel._cache._pool.pages(slot)) > 1 for slot in slots)
    return [(codes[slot], _keys_of(kernel, slot).tolist()) for slot in slots]


def test_pages_in_any_order_give_the_same_codes_and_keys(comparison: MakeComparison) -> None:
    """Of five streams in one launch, and of one."""
    b = comparison("0b6", blocks=2, shallow=True)  # keys and pages of the other size are equal
    kernel = _kernel(b, 5)
    expected = _speech_at_edges(b, kernel, range(5))
    for seed, slots in ((1, range(5)), (2, [3])):
        kernel = _kernel(b, 5)
        shuffle_pages(kernel, seed)
        assert _speech_at_edges(b, kernel, slots) == [expected[slot] for slot in slots]
        free = [*kernel._cache._pool._free]
        assert kernel._buffers.keys[free].isnan().all(), "a page of no slot was written"
        assert kernel._buffers.values[free].isnan().all()


def test_a_prompt_of_several_pages_has_the_same_keys_in_any_pages(
    comparison: MakeComparison,
) -> None:
    """It is run, and copied from the prefix cache; one of its batches crosses from page to page."""
    b = comparison("0b6", blocks=2, shallow=True)
    prompt = b.prompt.repeat(14, 1)[:139]
    found: list[tuple[Tensor, Tensor]] = []
    for seed, num_common in ((0, 0), (1, 138), (2, 40)):
        kernel = _kernel(b, 2)
        shuffle_pages(kernel, seed)
        for slot in range(2 if num_common else 1):
            kernel.prefill([PrefillRequest(slot, prompt, Sampling(seed=0), 0, num_common)])
            found.append((_keys_of(kernel, slot), kernel._buffers.prompt_hidden[slot]))
    assert len(found) == 5 and len(found[0][0]) == 139
    for keys, hidden in found[1:]:
        assert torch.equal(keys, found[0][0]) and torch.equal(hidden, found[0][1])


def test_streams_that_join_and_leave_a_small_cache_have_their_own_codes(
    comparison: MakeComparison,
) -> None:
    """Four slots share the pages of one; streams pass through host memory and through any slot.

    They have the codes of a batch with pages of its own, which are those of each stream alone (see
    `test_megakernel`).
    """
    b, rng = comparison("0b6", blocks=1, shallow=True), random.Random(0)
    kernel = _kernel(b, 4)
    _begin(b, kernel, range(3))
    expected = [step_slots(kernel, range(3)) for _ in range(3)]
    kernel = _kernel(b, 4, cache_positions=_MAX_POSITIONS)
    with pytest.raises(MemoryError, match=r"slot 3 needs 10 positions.* 0 of all 3 pages"):
        _begin(b, kernel, range(4))
    assert not kernel._state
    for slot in range(4):
        kernel.release(slot)
    for _ in range(2):
        streams = rng.sample(range(3), 3)
        shuffle_pages(kernel, rng.randrange(99))
        _begin(b, kernel, streams)
        made: dict[int, list[Codes]] = {slot: [] for slot in streams}
        for i in range(3):
            active = streams if i != 1 else streams[:2]
            for slot, codes in step_slots(kernel, active).items():
                made[slot].append(codes)
            if i == 1:
                away = streams[2]
                snapshot = kernel.swap_out(away)
                assert kernel.reserve(3, 128) and not kernel.reserve(streams[0], 129)
                with pytest.raises(MemoryError):
                    kernel.swap_in(away, snapshot)
                kernel.release(3)
                kernel.swap_in(away, snapshot)
        for slot in streams:
            assert made[slot] == [frames[slot] for frames in expected[: len(made[slot])]]
            kernel.release(slot)
        assert kernel._cache._pool.num_free == 3


def test_a_step_makes_the_frames_for_which_there_are_pages(comparison: MakeComparison) -> None:
    b = comparison("0b6", blocks=1, shallow=True)
    kernel = _kernel(b, 2, cache_positions=_MAX_POSITIONS)
    _begin(b, kernel, [0, 1])
    step_slots(kernel, [0, 1])
    _continue_at(kernel, 0, 126)
    _continue_at(kernel, 1, 255)
    codes = step_slots(kernel, [0, 1], 9)
    assert [len(frames) for frames in codes.values()] == [1, 1], "slot 1 has one position left"
    assert len(step_slots(kernel, [0], 9)[0]) == 1, "slot 0 has one position left"
    states = [kernel._state[slot].num_frames for slot in (0, 1)]
    with pytest.raises(MemoryError, match="slot 0 needs 129 positions and has pages for 128"):
        kernel.step([0, 1], 1)
    assert [kernel._state[slot].num_frames for slot in (0, 1)] == states
    kernel.release(1)
    assert len(step_slots(kernel, [0], 2)[0]) == 2


def test_a_page_that_other_positions_have_overwritten_has_no_prefix(
    comparison: MakeComparison,
) -> None:
    b = comparison("0b6", blocks=1, shallow=True)
    kernel = _kernel(b, 2, cache_positions=_MAX_POSITIONS)

    def begin(num_common: int) -> Tensor:
        prompt = b.prompt if num_common else b.prompt.flip(0)
        kernel.prefill([PrefillRequest(0, prompt, Sampling(seed=0), 0, num_common)])
        return kernel._buffers.prompt_hidden[0].clone()

    expected = begin(len(b.prompt) - 1)
    page = kernel._cache._pool.pages(0)[0]
    kernel.release(0)
    begin(0)  # of another prompt, which has no common positions
    assert kernel._cache._pool.pages(0)[0] == page
    kernel.release(0)
    assert torch.equal(begin(len(b.prompt) - 1), expected)
    kernel.release(0)
    assert kernel.reserve(1, 3 * 128) and kernel._cache._pool.pages(1)[0] == page
    kernel.release(1)
    kernel._cache._pool._free.rotate()
    assert kernel.reserve(1, 3 * 128) and kernel._cache._pool.pages(1)[0] != page
    kernel._buffers.keys[page] = 1.0  # as a long stream would leave it
    kernel.release(1)
    kernel._cache._pool._free.remove(page)
    kernel._cache._pool._free.append(page)
    assert torch.equal(begin(len(b.prompt) - 1), expected)
    assert kernel._cache._pool.pages(0)[0] == page


def test_a_launch_has_the_pages_that_it_writes(comparison: MakeComparison) -> None:
    """Without `step`, too: benchmarks launch frames themselves."""
    b = comparison("0b6", shallow=True)
    kernel = _kernel(b, 2)
    _begin(b, kernel, [0])
    step_slots(kernel, [0])
    _continue_at(kernel, 0, 127)
    kernel._launch([0], 3)
    kernel._wait(3)
    kernel._collect(1, 3)
    assert kernel._cache._pool.num_positions(0) >= 130
    assert kernel._buffers.page_table[0, :2].tolist() == kernel._cache._pool.pages(0)
