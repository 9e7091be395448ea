"""One decoder stack in plain torch: layers and key-value cache.

The phases have the names of those in csrc/decode.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.layers import (
    apply_rope,
    gated_mlp,
    linear,
    merge_heads,
    rms_norm,
    rope_table,
    split_heads,
)
from megakernel_tts.backends.attention_capture import AttentionObserver
from megakernel_tts.model.config import StackConfig
from megakernel_tts.model.weights import Layer, Stack


class KVCache:
    """Key-value cache of one network.

    Attributes:
        keys: [layers, slots, kv heads, positions, head_dim].
        values: As `keys`.
        rope: Rotary factors of every position, [2, positions, head_dim]; see `rope_table`.
    """

    def __init__(
        self, config: StackConfig, num_slots: int, max_positions: int, like: Tensor
    ) -> None:
        """Allocates the cache with the dtype and on the device of `like`."""
        shape = (
            config.num_layers,
            num_slots,
            config.num_kv_heads,
            max_positions,
            config.head_dim,
        )
        self.keys = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.values = torch.empty_like(self.keys)
        positions = torch.arange(max_positions, device=like.device)[None]
        table = rope_table(positions, config.head_dim, config.rope_theta, like.dtype)
        self.rope = table[:, 0, 0]

    def views(self, slot: int, end: int) -> list[Tensor]:
        """Returns views of a slot's keys and values at the positions before `end`."""
        return [self.keys[:, slot, :, :end], self.values[:, slot, :, :end]]


def run_stack(
    x: Tensor,
    stack: Stack,
    config: StackConfig,
    cache: KVCache,
    slots: Sequence[int],
    starts: Sequence[int],
    observer: AttentionObserver | None = None,
) -> Tensor:
    """Runs all layers and the final norm over new positions.

        x = x + W_o attention(rope(norm(W_q n)), rope(norm(W_k n)), W_v n),  n = norm(x)
        x = x + mlp(norm(x))

    Args:
        x: [batch, new positions, hidden].
        stack: Weights.
        config: Shapes of the stack.
        cache: Receives keys and values of the new positions.
        slots: Slot of each stream of the batch.
        starts: First new position of each stream.
        observer: Receives queries and keys of every layer.

    Returns:
        [batch, new positions, hidden].
    """
    offsets = torch.arange(x.shape[1], device=x.device)
    positions = torch.tensor(starts, device=x.device)[:, None] + offsets
    rope = cache.rope[:, positions].unsqueeze(2)
    for i, layer in enumerate(stack.layers):
        q, k, v = _qkv(x, layer, config, rope)
        keys, values = cache.keys[i], cache.values[i]
        x = x + linear(_attention(q, k, v, keys, values, slots, starts), layer.o)
        if observer is not None:
            observer.observe(i, q, keys, slots)
        n = rms_norm(x, layer.post_norm, config.norm_eps)
        x = x + gated_mlp(n, layer.gate, layer.up, layer.down)
    return rms_norm(x, stack.norm, config.norm_eps)


def _qkv(
    x: Tensor, layer: Layer, config: StackConfig, rope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, projections, norms of each query and key head, rotary embedding.

    Returns:
        q [batch, heads, new positions, head_dim]; k and v [batch, kv heads, new positions,
        head_dim].
    """
    eps, head_dim = config.norm_eps, config.head_dim
    n = rms_norm(x, layer.input_norm, eps)
    q = rms_norm(split_heads(linear(n, layer.q), head_dim), layer.q_norm, eps)
    k = rms_norm(split_heads(linear(n, layer.k), head_dim), layer.k_norm, eps)
    v = split_heads(linear(n, layer.v), head_dim)
    return apply_rope(q, rope), apply_rope(k, rope), v


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Sequence[int],
    starts: Sequence[int],
) -> Tensor:
    """Appends k and v to the slots' cache, then attends causally, each stream in its own slot.

    Args:
        q: [batch, heads, new positions, head_dim].
        k: [batch, kv heads, new positions, head_dim].
        v: As `k`.
        keys: The layer's key cache [slots, kv heads, positions, head_dim].
        values: As `keys`.
        slots: Slot of each stream.
        starts: First new position of each stream.

    Returns:
        [batch, new positions, heads * head_dim].
    """
    outputs: list[Tensor] = []
    num_new = q.shape[2]
    rows = zip(q.split(1), k.split(1), v.split(1), slots, starts, strict=True)
    for queries, new_keys, new_values, slot, start in rows:
        slot_keys, slot_values = (c[slot : slot + 1, :, : start + num_new] for c in (keys, values))
        slot_keys[:, :, start:] = new_keys
        slot_values[:, :, start:] = new_values
        attended = F.scaled_dot_product_attention(
            queries,
            slot_keys,
            slot_values,
            attn_mask=_causal_mask(start, q) if num_new > 1 and start else None,
            is_causal=num_new > 1 and not start,
            enable_gqa=True,
        )
        outputs.append(attended)
    return merge_heads(torch.cat(outputs))


def _causal_mask(start: int, q: Tensor) -> Tensor:
    """Returns [new, start + new]: True for earlier positions and for new ones up to each row's."""
    num_new = q.shape[2]
    return torch.ones(num_new, start + num_new, dtype=torch.bool, device=q.device).tril(start)
