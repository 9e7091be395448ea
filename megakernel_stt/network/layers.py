"""The parts of a Conformer block, for chunks with a past and for whole recordings.

Norms and softmax are computed in float32. On a CPU the bits of a stream do not depend on the other
streams of its batch.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.layers import linear, merge_heads, split_heads
from megakernel_stt.model.weights import (
    Attention,
    BatchNorm,
    Convolution,
    FeedForward,
    Linear,
    Norm,
)

_EPS = 1e-5  # of both kinds of norms
_POSITION_BASE = 10_000.0


def apply(layer: Linear, x: Tensor) -> Tensor:
    """Applies a linear layer, or a convolution of one position.

    Args:
        layer: Weight [out, in] or [out, in, 1].
        x: [batch, frames, in].

    Returns:
        [batch, frames, out].
    """
    weight = layer.weight.flatten(1)
    if not x.is_cuda:
        return linear(x, weight, layer.bias)
    # One product for all rows: on a GPU its summation order may depend on their number.
    y = x @ weight.t()
    return y if layer.bias is None else y + layer.bias


def layer_norm(norm: Norm, x: Tensor) -> Tensor:
    """Layer normalisation over the last axis."""
    y = F.layer_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.bias.float(), _EPS)
    return y.to(x.dtype)


def feed_forward(weights: FeedForward, x: Tensor) -> Tensor:
    """Computes `W_down silu(W_up norm(x))`."""
    return apply(weights.down, F.silu(apply(weights.up, layer_norm(weights.norm, x))))


def position_keys(weights: Attention, most: int, least: int) -> Tensor:
    """Keys of the distances from a query to a key.

    Args:
        weights: Of the attention.
        most: Largest distance: how many frames a key may be before its query.
        least: Smallest one, negative for keys after their query.

    Returns:
        [heads, distances, head_dim], from the largest distance to the smallest.
    """
    num_heads, head_dim = weights.content_bias.shape
    size, device = num_heads * head_dim, weights.position.device
    exponents = torch.arange(0, size, 2, device=device).float() / size
    distances = torch.arange(most, least - 1, -1, device=device).float()
    angles = distances[:, None] * (1.0 / _POSITION_BASE**exponents)
    embedding = torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(weights.position.dtype)
    return split_heads(linear(embedding[None], weights.position), head_dim)[0]


def attention(
    weights: Attention,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    visible: Tensor | None,
) -> Tensor:
    """Attention with relative positions; the queries are the last frames of the keys.

    Args:
        weights: Of the attention.
        query: [batch, heads, queries, head_dim].
        keys: [batch, heads, keys, head_dim].
        values: As `keys`.
        positions: See `position_keys`; distances from keys - 1 to 1 - queries.
        visible: [batch, keys] bools, or None if all keys are visible.

    Returns:
        [batch, queries, hidden].
    """
    num_queries, num_keys = query.shape[2], keys.shape[2]
    content = (query + weights.content_bias[:, None]) @ keys.transpose(2, 3)
    by_distance = (query + weights.position_bias[:, None]) @ positions.transpose(1, 2)
    # The distance of query i and key j is at index (queries - 1 - i) + j.
    rows = torch.arange(num_queries - 1, -1, -1, device=query.device)[:, None]
    index = rows + torch.arange(num_keys, device=query.device)
    position = by_distance.gather(3, index.expand(*by_distance.shape[:2], -1, -1))
    scores = (content + position).float() / math.sqrt(query.shape[3])
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    return apply(weights.output, merge_heads(scores.softmax(-1).to(values.dtype) @ values))


def gated_input(weights: Convolution, x: Tensor) -> Tensor:
    """The input of a convolution module's depthwise convolution.

    Args:
        weights: Of the module.
        x: [batch, frames, hidden].

    Returns:
        [batch, hidden, frames].
    """
    return F.glu(apply(weights.pointwise_in, layer_norm(weights.norm, x)), -1).transpose(1, 2)


def depthwise_output(weights: Convolution, gated: Tensor) -> Tensor:
    """The output of a convolution module.

    Args:
        weights: Of the module.
        gated: [batch, hidden, frames + kernel size - 1], padded `gated_input`.

    Returns:
        [batch, frames, hidden].
    """
    y = F.conv1d(gated, weights.depthwise.weight, weights.depthwise.bias, groups=gated.shape[1])
    y = y.transpose(1, 2)
    norm = weights.inner_norm
    if isinstance(norm, BatchNorm):
        scale = norm.weight.float() * torch.rsqrt(norm.variance.float() + _EPS)
        y = ((y.float() - norm.mean.float()) * scale + norm.bias.float()).to(y.dtype)
    else:
        y = layer_norm(norm, y)
    return apply(weights.pointwise_out, F.silu(y))
