"""The few operations that every network here is made of.

Norms, rotary angles and softmax are computed in float32 whatever the weights' type. Each row of a
batch is computed as if it were alone, so that a stream's result never depends on its neighbours.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 8  # rows of one product on a GPU
_CUDNN_FLAGS = threading.Lock()  # they belong to the process, not to a thread


@contextmanager
def exact_convolutions(device: torch.device) -> Iterator[None]:
    """Convolutions in full float32: by default cuDNN rounds their inputs to TF32's ten bits."""
    if device.type != "cuda":
        yield
        return
    with (
        _CUDNN_FLAGS,
        torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False),
    ):
        yield


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b`; a row's bits depend neither on the other rows nor on how many there are.

    A single product over all rows would let the library pick another summation order for another
    number of rows. On a CPU each batch row is a product of its own, hardly slower; on a GPU, whose
    library also looks at the size of the batch, every product has the same number of rows.

    Args:
        x: [batch, positions, in].
        weight: [out, in].
        bias: [out].

    Returns:
        [batch, positions, out].
    """
    if x.is_cuda:
        y = _in_blocks(x, weight)
    else:
        y = torch.bmm(x, weight.t().expand(x.shape[0], -1, -1))
    return y if bias is None else y + bias


def _in_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Products of exactly `_BLOCK` rows, the last one padded."""
    rows = x.flatten(0, -2)
    padded = F.pad(rows, (0, 0, 0, -len(rows) % _BLOCK))
    y = torch.cat([block @ weight.t() for block in padded.split(_BLOCK)])
    return y[: len(rows)].unflatten(0, x.shape[:-1])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis: in float32, rounded to x's type, then scaled."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of the rotary embedding at `positions`.

    Args:
        positions: [batch, positions], whole numbers.
        head_dim: Channels of a head; channel i turns with channel i + head_dim / 2.
        theta: The base of the angles.
        dtype: What the angles are rounded to after they were computed in float32.

    Returns:
        [2, batch, 1, positions, head_dim / 2].
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / theta**exponents)
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turns x [batch, heads, positions, head_dim] by the angles of `rotary`."""
    cos, sin = turn
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[batch, positions, heads * head_dim] -> [batch, heads, positions, head_dim]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, positions, head_dim] -> [batch, positions, heads * head_dim]."""
    return x.transpose(1, 2).flatten(2)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`W_down (silu(W_gate x) * (W_up x))`."""
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)
