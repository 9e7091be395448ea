"""Comparisons that several tests share: a kernel beside plain torch, speech of two runs."""

import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megakernel_common.checkpoint import map_leaves
from megakernel_common.kernels.loader import LaunchPath
from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.backends.reference import Reference
from megakernel_tts.kernels.decode import load_decode_kernels
from megakernel_tts.loader import LoadedModel
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.random_checkpoint import Size
from tests.emulator import EmulatedModule, emulated_kernels

SIZES: tuple[Size, ...] = ("0b6", "1b7")
SAMPLINGS = [
    Sampling(seed=1),
    Sampling.greedy(seed=2),
    Sampling(seed=2**40 + 3, top_p=0.8, temperature=1.2, repetition_penalty=1.5),
]


class Comparison:
    """A kernel beside the reference in float32 and in bfloat16, on the same rounded weights."""

    def __init__(
        self,
        loaded: LoadedModel,
        module: EmulatedModule | None,
        num_blocks: int = 3,
        path: LaunchPath | None = None,
    ) -> None:
        """Loads the weights into all of them.

        Args:
            loaded: A checkpoint on the CPU.
            module: The emulated kernels; None for the GPU.
            num_blocks: Thread blocks of the emulated grid.
            path: How kernels of the GPU are compiled and launched, if not by default.
        """
        backend = loaded.engine.backend
        assert isinstance(backend, Reference)
        self.config: ModelConfig = loaded.config
        self.module = module
        device = torch.device("cuda" if module is None else "cpu")
        self._kernels = (
            load_decode_kernels(loaded.config, device, path=path)
            if module is None
            else emulated_kernels(module, num_blocks)
        )
        half = map_leaves(backend.model, lambda w: w.to(device, torch.bfloat16))
        exact = map_leaves(half, lambda w: w.float())
        prompt_builder = loaded.engine.prompt_builder
        pad = self.pad = prompt_builder.pad[0].to(device, torch.bfloat16)
        self.half = Reference(half, self.config, pad, num_slots=1, max_positions=64)
        self.exact = Reference(exact, self.config, pad.float(), num_slots=1, max_positions=64)
        self.norm = exact.talker.stack.norm
        self.kernel = self.make_kernel()
        speakers = self.config.talker.speakers
        speaker = "ryan" if "ryan" in speakers else next(iter(speakers))
        with torch.inference_mode():
            prefix = prompt_builder.prefix(speaker, "english", None)
            self.text = torch.cat([prompt_builder.embed_text([5, 9, 200]), prompt_builder.eos]).to(
                pad.dtype
            )
            prompt = prompt_builder.build(prefix, [7], "streaming", text_ended=True)
            assert prompt is not None
            self.prompt = prompt.prefill.to(pad.dtype)

    def make_kernel(self, captured_heads: Sequence[tuple[int, int]] = ()) -> Megakernel:
        """Makes a kernel that captures the scores of some heads."""
        return Megakernel(
            self.half.model,
            self.config,
            self.pad,
            num_slots=4,
            max_positions=64,
            captured_heads=captured_heads,
            kernels=self._kernels,
        )

    def begin(self, slot: int, stream: int) -> None:
        """Streams have prompts of different lengths."""
        self.kernel.prefill(
            [PrefillRequest(slot, self.prompt[stream:].contiguous(), SAMPLINGS[stream])]
        )
        self.kernel.feed(slot, self.text, True)


MakeComparison = Callable[..., Comparison]


def next_frame(kernel: Megakernel) -> tuple[list[int], Tensor, Tensor]:
    """The next codes of slot 0, and the logits that the first and the last were drawn from."""
    kernel._launch([0], 1)
    kernel._wait(1)
    [[(_, *codes)]] = kernel._collect(1, 1)
    state, talker = kernel._state[0], kernel._config.talker
    state.codes = [int(code) for code in codes]
    state.num_frames += 1
    offsets, workspace = kernel._kernels.info.workspace, kernel._buffers.workspace
    first, last = (
        workspace[begin : begin + count] & ~3  # without the epoch tags
        for begin, count in (
            (offsets.talker.logits, talker.vocab_size),
            (offsets.predictor.logits, talker.num_codes),
        )
    )
    return state.codes, first.view(torch.float32), last.view(torch.float32)


def assert_same_speech(pcm: bytes, expected: bytes) -> None:
    """Compares 16-bit samples that two runs made in plain torch.

    Sizes of chunks follow the speed of the machine, and may change a sample by one step.
    """
    assert len(expected) > 0
    samples = np.frombuffer(pcm, "<i2")
    np.testing.assert_allclose(samples, np.frombuffer(expected, "<i2"), atol=1, rtol=0)


def shuffle_pages(kernel: Megakernel, seed: int) -> None:
    """Fills the free pages of a KV cache with NaN, and puts them in a random order.

    Args:
        kernel: Its later streams get the pages in that order.
        seed: Of the order.
    """
    free = kernel._cache._pool._free
    kernel._cache._pool._free = deque(random.Random(seed).sample([*free], len(free)))
    # What earlier streams left there must have no effect.
    for tensor in (kernel._buffers.keys, kernel._buffers.values):
        tensor[[*free]] = torch.nan


def step_slots(
    kernel: Megakernel, slots: Sequence[int], num_frames: int = 1
) -> dict[int, list[list[int]]]:
    """Makes frames; returns the codes [frames, groups] of each slot."""
    frames = kernel.step(slots, num_frames)
    return {slot: made.codes.tolist() for slot, made in zip(slots, frames, strict=True)}


def fill_positions(kernel: Megakernel, slot: int, num_positions: int) -> None:
    """Gives a slot random keys and values for its first positions."""
    assert kernel.reserve(slot, num_positions)
    generator = torch.Generator().manual_seed(slot)
    for view in kernel._cache.views(slot, num_positions):
        view.copy_(torch.randn(view.shape, generator=generator))
