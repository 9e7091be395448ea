"""The codec's weights as its CUDA kernels take them.

Every convolution is a product: of a row's taps, oldest first, with columns. A transposed one of
stride s and kernel 2s has two taps, and the columns of s output rows side by side. Channels are
padded to a multiple of 32 with zeros, which stay zeros all the way.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_tts.codec import weights as w

STEP = 32  # channels that a warp multiplies at a time


@dataclass(frozen=True)
class Packed:
    """A layer's weights.

    Attributes:
        weights: float16 [columns / 8, steps, 32, 8]: of a tile of eight columns and 32 channels,
            lane 4 c + t has column c, channels 8 t to 8 t + 7.
        column: float32 [columns, 4]: scale and bias of the sum, and the two factors of a snake.
        taps: Rows that a row depends on.
        channels: Of a row of the input.
        dilation: Rows from one tap to the next.
    """

    weights: Tensor
    column: Tensor
    taps: int
    channels: int
    dilation: int

    @property
    def columns(self) -> int:
        """How many sums a row has."""
        return len(self.column)


def padded(channels: int) -> int:
    """The next multiple of `STEP`."""
    return -(-channels // STEP) * STEP


def _pad(x: Tensor, dim: int) -> Tensor:
    size = x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (0, padded(size) - size))


def pad_last(x: Tensor) -> Tensor:
    """[..., channels] with padded channels."""
    return _pad(x, -1)


def pack(
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    snake: w.Snake | None = None,
    dilation: int = 1,
) -> Packed:
    """Rounds a layer to float16, each column in units of its own power of two.

    Args:
        weight: float32 [columns, taps, channels], of multiples of 8 columns and 32 channels.
        bias: [columns].
        scale: [columns], of sum and bias.
        snake: What follows, folded (`decoder.fold_snake`), [columns].
        dilation: Rows from one tap to the next.
    """
    columns, taps, channels = weight.shape
    _, exponent = torch.frexp(weight.abs().amax((1, 2)))
    unit = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    tiles = (weight / unit[:, None, None]).half().reshape(columns // 8, 8, -1, 4, 8)
    zero = torch.zeros_like(unit)
    bias, scale = zero if bias is None else bias, zero + 1 if scale is None else scale
    alpha, beta = (zero, zero) if snake is None else (snake.alpha.flatten(), snake.beta.flatten())
    return Packed(
        tiles.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous(),
        torch.stack([unit * scale, bias * scale, alpha, beta], dim=1).contiguous(),
        taps,
        channels,
        dilation,
    )


def linear(
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
) -> Packed:
    """A product [out, in], behind a norm whose own scale goes into the weights."""
    return pack((weight if norm is None else weight * norm)[:, None], bias, scale)


def _pad_snake(snake: w.Snake | None, times: int = 1) -> w.Snake | None:
    if snake is None:
        return None
    return w.Snake(_pad(snake.alpha, 0).repeat(times, 1), _pad(snake.beta, 0).repeat(times, 1))


def convolution(conv: w.Conv, snake: w.Snake | None = None) -> Packed:
    """A causal convolution, and the folded snake after it."""
    assert conv.bias is not None and conv.groups == 1
    weight = _pad(_pad(conv.weight.transpose(1, 2), 0), 2)
    return pack(weight, _pad(conv.bias, 0), None, _pad_snake(snake), conv.dilation)


def transposed(conv: w.Conv, snake: w.Snake | None = None) -> Packed:
    """A transposed convolution of kernel s or 2s, and the folded snake after it."""
    assert conv.bias is not None
    s = conv.stride
    weight = conv.weight.unflatten(2, (-1, s)).permute(3, 1, 2, 0).flip(2)  # [s, out, taps, in]
    weight = _pad(_pad(weight, 1), 3).flatten(0, 1)
    return pack(weight, _pad(conv.bias, 0).repeat(s), None, _pad_snake(snake, s))


def sample(conv: w.Conv) -> Packed:
    """The convolution to one channel: its rounded weights, and what was rounded off beside them."""
    assert conv.bias is not None
    weight = _pad(conv.weight.transpose(1, 2), 2)
    _, exponent = torch.frexp(weight.abs().amax())
    rounded = torch.ldexp(torch.ldexp(weight, -exponent).half().float(), exponent)
    rows = F.pad(torch.cat([rounded, weight - rounded]), (0, 0, 0, 0, 0, 6))
    return pack(rows, F.pad(conv.bias, (0, 7)))


def turned(weight: Tensor, head: int) -> Tensor:
    """Rows [heads * head, in] with the two channels that turn together side by side."""
    return turned_last(weight.t().unflatten(1, (-1, head))).flatten(1).t()


def turned_last(x: Tensor) -> Tensor:
    """The same of a head's channels, [..., head]: i and i + head / 2 become 2 i and 2 i + 1."""
    return x.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)
