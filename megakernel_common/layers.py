"""Operations that the plain-torch networks share.

Norms, rotary angles and softmax are computed in float32 for every dtype of the weights. All
operations are batch-invariant: a row's bits do not depend on the other rows.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

_ROW_GROUP = 8  # rows of one matrix product on a GPU
_CUDNN_FLAGS_LOCK = threading.Lock()  # the flags are per process, not per thread


@contextmanager
def exact_convolutions(device: torch.device) -> Iterator[None]:
    """Context with full float32 convolutions; by default cuDNN rounds inputs to TF32 (10 bits)."""
    if device.type != "cuda":
        yield
        return
    with (
        _CUDNN_FLAGS_LOCK,
        torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False),
    ):
        yield


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `x W^T + b`; a row's bits do not depend on the other rows or their number.

    The BLAS libraries choose the summation order by the number of rows. On a CPU each batch row is
    therefore a separate product, at nearly the same speed. On a GPU, where the choice also depends
    on the batch size, every product has exactly `_ROW_GROUP` rows.

    Args:
        x: [batch, positions, in].
        weight: [out, in].
        bias: [out].

    Returns:
        [batch, positions, out].
    """
    if x.is_cuda:
        y = _by_row_groups(x, weight)
    else:
        y = torch.bmm(x, weight.mT.expand(x.shape[0], -1, -1))
    return y if bias is None else y + bias


def _by_row_groups(x: Tensor, weight: Tensor) -> Tensor:
    """Products of exactly `_ROW_GROUP` rows; the last one is padded."""
    rows = x.flatten(0, -2)
    padded = F.pad(rows, (0, 0, 0, -len(rows) % _ROW_GROUP))
    y = torch.cat([row_group @ weight.t() for row_group in padded.split(_ROW_GROUP)])
    return y[: len(rows)].unflatten(0, x.shape[:-1])


def rms_norm(x: Tensor, weight: Tensor, eps: float | Tensor) -> Tensor:
    """Root-mean-square norm over the last axis: in float32, rounded to x's dtype, then scaled."""
    y = x.float()
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rope_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Factors of the rotary position embedding (RoPE) for `apply_rope`.

    Args:
        positions: [batch, positions], integers.
        head_dim: Channels of a head; channel i is paired with channel i + head_dim / 2.
        theta: Base of the angles.
        dtype: Of the result; the angles are computed in float32 first.

    Returns:
        [2, batch, 1, positions, head_dim]: cosines, then sines, which are negative in the lower
        half of the channels.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)]).to(dtype)


def apply_rope(x: Tensor, rope: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Rotates x [batch, heads, positions, head_dim] by the angles of a `rope_table`."""
    cos, sin = rope
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[batch, positions, heads * head_dim] -> [batch, heads, positions, head_dim]."""
    return x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, positions, head_dim] -> [batch, positions, heads * head_dim]."""
    return x.transpose(1, 2).flatten(2)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Computes `W_down (silu(W_gate x) * (W_up x))`."""
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)
