"""GPU memory of the megakernel: the formula, and the number of pages of the KV cache."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megakernel_common.checkpoint import TensorSpec, leaves
from megakernel_tts.kernels.decode import DecodeKernels
from megakernel_tts.kernels.structs import HEAD_DIM, NUM_CODE_GROUPS, STEP_K
from megakernel_tts.model.config import ModelConfig, StackConfig
from megakernel_tts.model.weights import model_specs

MAX_FRAMES = 32  # of a stream, in one launch
# What the backend allocates while it works: the prefix cache (64 MiB), matrices that are being
# packed, prompts and text on their way to the GPU, keys and values on their way to the host.
_WORKING_BYTES = 512 << 20
_BF16_BYTES, _WORD_BYTES = 2, 4
_GIB = 1 << 30

_log = logging.getLogger("megakernel_tts")


@dataclass(frozen=True)
class DecodeMemory:
    """Bytes that the backend allocates on the GPU, beside embeddings and codec.

    Attributes:
        weights: Talker and code predictor.
        slots: What all slots have, beside keys and values: text vectors, a hidden state, the codes
            that were sampled.
        launches: What all launches share: the workspace, the code predictor's keys and values, the
            rope table, captured scores.
        page: A page of the KV cache.
    """

    weights: int
    slots: int
    launches: int
    page: int

    def total(self, num_pages: int) -> int:
        """Returns the bytes with a number of pages."""
        return self.weights + self.slots + self.launches + num_pages * self.page


def decode_memory(
    config: ModelConfig,
    kernels: DecodeKernels,
    num_slots: int,
    max_positions: int,
    num_captured_heads: int,
) -> DecodeMemory:
    """Computes the memory of a model.

    Args:
        config: The model's numbers.
        kernels: Its kernels.
        num_slots: Streams at a time.
        max_positions: Positions of one stream at most.
        num_captured_heads: Heads whose scores are captured.
    """
    talker, predictor = config.talker, config.predictor
    specs, info, num_streams = model_specs(config), kernels.info, kernels.max_streams
    slot = (
        _BF16_BYTES * max_positions * talker.stack.hidden_size
        + _WORD_BYTES * talker.stack.hidden_size
        + talker.vocab_size
    )
    scores = num_streams * MAX_FRAMES * num_captured_heads * max_positions
    rope_table = max_positions * HEAD_DIM
    predictor_cache = num_streams * _kv_bytes(predictor.stack, NUM_CODE_GROUPS, info.kv_width)
    words = kernels.num_workspace_values + rope_table + scores
    return DecodeMemory(
        weights=_BF16_BYTES * (_num_elements(specs.talker) + _num_elements(specs.predictor)),
        slots=num_slots * slot,
        launches=_WORD_BYTES * words + predictor_cache,
        page=_kv_bytes(talker.stack, info.page_size, info.kv_width),
    )


def choose_num_pages(
    memory: DecodeMemory,
    *,
    num_slots: int,
    max_positions: int,
    page_size: int,
    cache_positions: int | None,
    free_bytes: int | None,
) -> int:
    """Chooses the number of pages: as many as requested, else all that slots can use and that fit.

    Args:
        memory: What the backend needs.
        num_slots: Streams at a time.
        max_positions: Positions of one stream at most.
        page_size: Positions of a page.
        cache_positions: Positions of all streams together that were requested.
        free_bytes: Free memory of the GPU; None if it is not limited.

    Raises:
        ValueError: Memory cannot hold the pages, or they are fewer than one stream may need.
    """
    slot_pages = -(-max_positions // page_size)
    wanted = least = num_slots * slot_pages
    if cache_positions is not None:
        if cache_positions < max_positions:
            raise ValueError(
                f"cache_positions is {cache_positions:,}; one stream may have {max_positions:,} "
                "positions, so the cache must hold as many."
            )
        wanted = least = min(wanted, -(-cache_positions // page_size))
    else:
        least = min(wanted, max(num_slots, slot_pages))
    if free_bytes is None:
        return wanted
    usable = free_bytes - _WORKING_BYTES - memory.total(0)
    num_fitting = max(usable // memory.page, 0)
    if num_fitting < least:
        raise ValueError(
            f"The model needs {memory.total(least) / _GIB:.1f} GiB of GPU memory for {num_slots} "
            f"slots: weights {memory.weights / _GIB:.1f}, {least * page_size:,} positions of keys "
            f"and values {least * memory.page / _GIB:.1f} ({memory.page / page_size / 1024:.0f} "
            f"KiB each), text and workspace {(memory.slots + memory.launches) / _GIB:.1f}; and "
            f"{_WORKING_BYTES / _GIB:.1f} to work. {free_bytes / _GIB:.1f} GiB are free. Use fewer "
            "slots or cache_positions, or free memory of the GPU."
        )
    if num_fitting < wanted:
        _log.warning(
            "The KV cache holds %s positions instead of %s for %d slots of %s: %.1f GiB of GPU "
            "memory are free. Streams wait while it is full.",
            f"{num_fitting * page_size:,}",
            f"{wanted * page_size:,}",
            num_slots,
            f"{max_positions:,}",
            free_bytes / _GIB,
        )
    return min(wanted, num_fitting)


def free_memory(device: torch.device) -> int | None:
    """Returns the bytes of a GPU that can be allocated; None for another device."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached


def _num_elements(tree: object) -> int:
    """The elements of all tensors of a tree of specs; rows of packed matrices have whole steps."""
    specs: Sequence[TensorSpec] = [*leaves(tree)]
    widths = (
        one.shape[-1] + (-one.shape[-1] % STEP_K if len(one.shape) > 1 else 0) for one in specs
    )
    return sum(math.prod(one.shape[:-1]) * width for one, width in zip(specs, widths, strict=True))


def _kv_bytes(stack: StackConfig, num_positions: int, kv_width: int) -> int:
    """Bytes of keys and values."""
    return 2 * _BF16_BYTES * stack.num_layers * stack.num_kv_heads * num_positions * kv_width
