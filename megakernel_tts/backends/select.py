"""Chooses the type and the backend of the two networks."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megakernel_common.checkpoint import map_leaves
from megakernel_common.kernels.loader import obstacle
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import Backend
from megakernel_tts.backends.reference import Reference
from megakernel_tts.model.config import ModelConfig

if TYPE_CHECKING:
    from megakernel_tts.model.weights import Model

_log = logging.getLogger("megakernel_tts")


def uses_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether talker and code predictor run as CUDA kernels."""
    return device.type == "cuda" and dtype == torch.bfloat16


def choose_backend(
    model: "Model",
    config: ModelConfig,
    pad: Tensor,
    *,
    num_slots: int,
    max_positions: int,
    cache_positions: int | None = None,
    captured_heads: Sequence[tuple[int, int]] = (),
) -> Backend:
    """The backend for the device that `pad` is on.

    Args:
        model: Tensors in the type to compute in, the codec's embeddings on the device. Other
            tensors may be on the host; the backend copies them to the device in its own layout.
        config: The model's numbers.
        pad: [hidden], the text vector that represents "no text", on the device.
        num_slots: Streams at a time.
        max_positions: Positions of one stream.
        cache_positions: Positions of all streams together, as in `Megakernel`; plain torch has
            memory for all positions of every slot.
        captured_heads: Layer and head of the talker's heads whose attention scores `step` returns.
    """
    if uses_kernels(pad.device, pad.dtype):
        return Megakernel(
            model,
            config,
            pad,
            num_slots=num_slots,
            max_positions=max_positions,
            cache_positions=cache_positions,
            captured_heads=captured_heads,
        )
    networks = map_leaves((model.talker, model.predictor), lambda tensor: tensor.to(pad.device))
    on_device = replace(model, talker=networks[0], predictor=networks[1])
    return Reference(
        on_device,
        config,
        pad,
        num_slots=num_slots,
        max_positions=max_positions,
        captured_heads=captured_heads,
    )


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU that can run the kernels, else float32.

    Raises:
        ValueError: Another type (float16 overflows in this model).
    """
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        if reason := obstacle(device):
            _log.warning("%s The GPU runs plain torch in float32.", reason)
            return torch.float32
        return torch.bfloat16
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype is {dtype!r}; choose auto, bfloat16 or float32.")
    return getattr(torch, dtype)
