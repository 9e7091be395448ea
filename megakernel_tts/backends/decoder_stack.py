"""One decoder stack in plain torch: its layers, and what their attention remembers.

Phase names are those of csrc/phases.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_tts.backends.attention_capture import AttentionObserver
from megakernel_tts.model.config import StackConfig
from megakernel_tts.model.layers import (
    apply_rope,
    gated_mlp,
    linear,
    merge_heads,
    rms_norm,
    rope_table,
    split_heads,
)
from megakernel_tts.model.weights import Layer, Stack


class Cache:
    """Keys and values of one network: [layers, slots, kv heads, positions, head_dim]."""

    def __init__(self, c: StackConfig, slots: int, positions: int, like: Tensor) -> None:
        """Allocates them, of the type and on the device of `like`."""
        shape = (c.num_layers, slots, c.num_kv_heads, positions, c.head_dim)
        self.keys = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.values = torch.empty_like(self.keys)

    def parts(self, slot: int, end: int) -> list[Tensor]:
        """What a slot holds of the positions before `end`."""
        return [self.keys[:, slot, :, :end], self.values[:, slot, :, :end]]


def run_stack(
    x: Tensor,
    stack: Stack,
    c: StackConfig,
    cache: Cache,
    slots: Sequence[int],
    starts: Sequence[int],
    watch: AttentionObserver | None = None,
) -> Tensor:
    """All layers and the last norm over new positions.

    Args:
        x: [batch, new positions, hidden].
        stack: The layers.
        c: Their numbers.
        cache: What they remember; the new positions' keys and values are added.
        slots: Of each stream.
        starts: Each stream's first new position.
        watch: Is shown every layer.

    Returns:
        [batch, new positions, hidden].
    """
    steps = torch.arange(x.shape[1], device=x.device)
    positions = torch.tensor(starts, device=x.device)[:, None] + steps
    turn = rope_table(positions, c.head_dim, c.rope_theta, x.dtype)
    for i, layer in enumerate(stack.layers):
        q, k, v = _qkv(x, layer, c, turn)
        keys, values = cache.keys[i], cache.values[i]
        x = x + linear(_attend(q, k, v, keys, values, slots, starts), layer.o)
        if watch is not None:
            watch.look(i, q, keys, slots)
        n = rms_norm(x, layer.post_norm, c.norm_eps)
        x = x + gated_mlp(n, layer.gate, layer.up, layer.down)
    return rms_norm(x, stack.norm, c.norm_eps)


def _qkv(x: Tensor, layer: Layer, c: StackConfig, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, projections, per-head norms of query and key, rotary embedding."""
    n = rms_norm(x, layer.input_norm, c.norm_eps)
    q = rms_norm(split_heads(linear(n, layer.q), c.head_dim), layer.q_norm, c.norm_eps)
    k = rms_norm(split_heads(linear(n, layer.k), c.head_dim), layer.k_norm, c.norm_eps)
    return apply_rope(q, turn), apply_rope(k, turn), split_heads(linear(n, layer.v), c.head_dim)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Sequence[int],
    starts: Sequence[int],
) -> Tensor:
    """Appends k and v to the slots, then attends causally, each stream within its own slot.

    Args:
        q: [batch, heads, new positions, head_dim].
        k: [batch, kv heads, new positions, head_dim].
        v: As k.
        keys: The layer's cache [slots, kv heads, positions, head_dim].
        values: As keys.
        slots: Of each stream.
        starts: Each stream's first new position.

    Returns:
        [batch, new positions, heads * head_dim].
    """
    outputs: list[Tensor] = []
    several = q.shape[2] > 1
    for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        end = start + q.shape[2]
        keys[slot, :, start:end] = k[row]
        values[slot, :, start:end] = v[row]
        attended = F.scaled_dot_product_attention(
            q[row : row + 1],
            keys[slot : slot + 1, :, :end],
            values[slot : slot + 1, :, :end],
            attn_mask=_behind(start, q) if several and start else None,
            is_causal=several and not start,
            enable_gqa=True,
        )
        outputs.append(attended)
    return merge_heads(torch.cat(outputs))


def _behind(start: int, q: Tensor) -> Tensor:
    """Whom new positions look at, [new, start + new]: all old ones, new ones up to themselves."""
    new = q.shape[2]
    return torch.ones(new, start + new, dtype=torch.bool, device=q.device).tril(start)
