"""One decoder stack in plain torch: layers and key-value cache.

The phases have the names of those in csrc/decode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.layers import (
    apply_rope,
    linear,
    merge_heads,
    rms_norm,
    rope_table,
    split_heads,
)
from megakernel_tts.backends.attention_capture import AttentionObserver
from megakernel_tts.model.config import StackConfig
from megakernel_tts.model.weights import Layer, Stack


@dataclass(frozen=True)
class FusedLayer:
    """A layer whose projections of the same input are one matrix each.

    Attributes:
        input_norm: As in `Layer`.
        qkv: [heads * head_dim of q, k and v, hidden].
        qk_norm: [heads + kv heads, 1, head_dim]: `q_norm` of each query head, `k_norm` of each key
            head.
        o: As in `Layer`.
        post_norm: As in `Layer`.
        gate_up: [2 * intermediate, hidden].
        down: As in `Layer`.
    """

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class FusedStack:
    """A stack of fused layers.

    Attributes:
        layers: The layers.
        norm: The final norm.
        eps: [], float32: the norms' epsilon; torch converts a number on each use.
    """

    layers: tuple[FusedLayer, ...]
    norm: Tensor
    eps: Tensor


def fuse_stack(stack: Stack, config: StackConfig) -> tuple[FusedStack, Stack]:
    """Fuses projections and head norms: the number of small operations counts, not their size.

    Returns:
        The fused stack, and an equal one whose projections are views of it: the weights exist once
        when the given stack is freed.
    """
    fused = tuple(_fuse_layer(layer, config) for layer in stack.layers)
    layers = tuple(map(_with_views, stack.layers, fused))
    eps = torch.tensor(config.norm_eps, device=stack.norm.device)
    return FusedStack(fused, stack.norm, eps), Stack(layers, stack.norm)


def _fuse_layer(layer: Layer, config: StackConfig) -> FusedLayer:
    q_norms = layer.q_norm.expand(config.num_heads, 1, -1)
    k_norms = layer.k_norm.expand(config.num_kv_heads, 1, -1)
    return FusedLayer(
        input_norm=layer.input_norm,
        qkv=torch.cat([layer.q, layer.k, layer.v]),
        qk_norm=torch.cat([q_norms, k_norms]),
        o=layer.o,
        post_norm=layer.post_norm,
        gate_up=torch.cat([layer.gate, layer.up]),
        down=layer.down,
    )


def _with_views(layer: Layer, fused: FusedLayer) -> Layer:
    q, k, v = fused.qkv.split([len(layer.q), len(layer.k), len(layer.v)])
    gate, up = fused.gate_up.chunk(2)
    return replace(layer, q=q, k=k, v=v, gate=gate, up=up)


class CacheWindow(NamedTuple):
    """Views of a layer's cache for one stream, [1, kv heads, positions, head_dim].

    Attributes:
        keys: Up to and including the new positions.
        values: As `keys`.
        new_keys: At the new positions.
        new_values: As `new_keys`.
    """

    keys: Tensor
    values: Tensor
    new_keys: Tensor
    new_values: Tensor


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

    def windows(self, slot: int, start: int, end: int) -> list[CacheWindow]:
        """Returns views of a slot for each layer; those of all layers are made together."""
        keys, values = (c[:, slot : slot + 1, :, :end] for c in (self.keys, self.values))
        new_keys, new_values = keys[..., start:, :], values[..., start:, :]
        views = (tensor.unbind() for tensor in (keys, values, new_keys, new_values))
        return [CacheWindow(*layer) for layer in zip(*views, strict=True)]


def run_stack(
    x: Tensor,
    stack: FusedStack,
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
    num_new = x.shape[1]
    rope = torch.stack([cache.rope[:, start : start + num_new] for start in starts], dim=1)
    cos, sin = rope.unsqueeze(2)
    by_stream = [
        cache.windows(slot, start, start + num_new)
        for slot, start in zip(slots, starts, strict=True)
    ]
    for i, (layer, *windows) in enumerate(zip(stack.layers, *by_stream, strict=True)):
        q, k, v = _qkv(x, layer, config, stack.eps, (cos, sin))
        x = x + linear(_attention(q, k, v, windows), layer.o)
        if observer is not None:
            observer.observe(i, q, cache.keys[i], slots)
        n = rms_norm(x, layer.post_norm, stack.eps)
        gate, up = linear(n, layer.gate_up).chunk(2, dim=-1)
        x = x + linear(F.silu(gate) * up, layer.down)
    return rms_norm(x, stack.norm, stack.eps)


def _qkv(
    x: Tensor, layer: FusedLayer, config: StackConfig, eps: Tensor, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, projections, norms of each query and key head, rotary embedding.

    Returns:
        q [batch, heads, new positions, head_dim]; k and v [batch, kv heads, new positions,
        head_dim].
    """
    num_q, num_kv = config.num_heads, config.num_kv_heads
    n = rms_norm(x, layer.input_norm, eps)
    heads = split_heads(linear(n, layer.qkv), config.head_dim)
    qk, v = heads.split_with_sizes([num_q + num_kv, num_kv], dim=1)
    qk = apply_rope(rms_norm(qk, layer.qk_norm, eps), rope)
    q, k = qk.split_with_sizes([num_q, num_kv], dim=1)
    return q, k, v


def _attention(q: Tensor, k: Tensor, v: Tensor, windows: Sequence[CacheWindow]) -> Tensor:
    """Appends k and v to the cache, then attends causally, each stream in its own slot.

    Args:
        q: [batch, heads, new positions, head_dim].
        k: [batch, kv heads, new positions, head_dim].
        v: As `k`.
        windows: The layer's cache for each stream.

    Returns:
        [batch, new positions, heads * head_dim].
    """
    num_new = q.shape[2]
    outputs: list[Tensor] = []
    for queries, new_keys, new_values, window in zip(*map(_rows, (q, k, v)), windows, strict=True):
        window.new_keys.copy_(new_keys)
        window.new_values.copy_(new_values)
        start = window.keys.shape[2] - num_new
        attended = F.scaled_dot_product_attention(
            queries,
            window.keys,
            window.values,
            attn_mask=_causal_mask(start, q) if num_new > 1 and start else None,
            is_causal=num_new > 1 and not start,
            enable_gqa=True,
        )
        outputs.append(attended)
    return merge_heads(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def _rows(x: Tensor) -> Sequence[Tensor]:
    """Divides a batch into its rows; that of one stream is returned as it is."""
    return x.split(1) if x.shape[0] > 1 else [x]


def _causal_mask(start: int, q: Tensor) -> Tensor:
    """Returns [new, start + new]: True for earlier positions and for new ones up to each row's."""
    num_new = q.shape[2]
    return torch.ones(num_new, start + num_new, dtype=torch.bool, device=q.device).tril(start)
