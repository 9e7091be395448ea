"""Kernels for few and for many streams beside each other, on emulated instructions."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.kernels.decode import DecodeKernels
from megakernel_tts.loader import LoadedModel
from tests.comparison import Comparison, fill_positions, shuffle_pages, step_slots
from tests.emulator import EmulatedModule, emulated_kernels

_NUM_BLOCKS = 6  # the least that hold the rows of the residual
_MAX_POSITIONS = 544
_SPAN_EDGES = (127, 128, 129, 255, 256, 257, 511, 512, 513)  # a span has 128 positions


class WideRig:
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
        self._comparison, self._num_slots = narrow, width
        self.narrow, self.wide = (self._make(one) for one in (narrow._kernels, kernels))

    def with_capture(self, heads: Sequence[tuple[int, int]]) -> tuple[Megakernel, Megakernel]:
        """Both kernels as backends that capture scores of heads, (layer, head)."""
        return self._make(self.narrow._kernels, heads), self._make(self.wide._kernels, heads)

    def _make(
        self, kernels: DecodeKernels, captured_heads: Sequence[tuple[int, int]] = ()
    ) -> Megakernel:
        c = self._comparison
        return Megakernel(
            c.half.model,
            c.config,
            c.pad,
            num_slots=self._num_slots,
            max_positions=_MAX_POSITIONS,
            captured_heads=captured_heads,
            kernels=kernels,
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

    def continue_at(self, kernel: Megakernel, slots: Sequence[int]) -> dict[int, list[list[int]]]:
        """Starts streams, and moves them to positions at the edges of attention spans.

        Each kernel has its own order of pages.

        Returns:
            Codes [frames, groups] of each slot's first frame.
        """
        shuffle_pages(kernel, seed=1 if kernel is self.wide else 2)
        self.begin(kernel, slots)
        first = step_slots(kernel, slots)
        for slot in slots:
            num_positions = kernel._state[slot].num_prompt = _SPAN_EDGES[slot % len(_SPAN_EDGES)]
            fill_positions(kernel, slot, num_positions)
        return first


MakeWideRig = Callable[..., WideRig]


def cache_of(kernel: Megakernel, slot: int) -> list[Tensor]:
    """Bits of the talker's keys and values of a slot."""
    return [view.view(torch.int16) for view in kernel._cache.views(slot, _MAX_POSITIONS)]


def assert_same_caches(one: Megakernel, other: Megakernel, slots: Sequence[int]) -> None:
    """Checks that two kernels have the same keys and values of slots."""
    for slot in slots:
        views = [*zip(cache_of(one, slot), cache_of(other, slot), strict=True)]
        assert views and all(torch.equal(ours, theirs) for ours, theirs in views)
