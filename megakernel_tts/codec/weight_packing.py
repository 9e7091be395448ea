"""Packs the codec's weights for its CUDA kernels.

Every convolution is a matrix product over K = (tap, channel), oldest tap first. A transposed
convolution of stride s and kernel 2s is a product of two taps; its columns are the channels of s
output rows side by side. Channels are padded with zeros to a multiple of 32 and stay zero in all
layers.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_tts.codec import weights as w
from megakernel_tts.kernels.codec_structs import STEP_CHANNELS


@dataclass(frozen=True)
class Packed:
    """Weights of one layer.

    Attributes:
        weights: float16 [columns / 8, steps, 32, 8]. In a tile of 8 columns and 32 channels, lane
            4 c + t has column c, channels 8 t to 8 t + 7.
        columns: float32 [columns, 4]: scale and bias of the sum, alpha and beta of a snake.
        taps: Input rows of an output row.
        channels: Channels of an input row.
        dilation: Rows from one tap to the next.
    """

    weights: Tensor
    columns: Tensor
    taps: int
    channels: int
    dilation: int

    @property
    def num_columns(self) -> int:
        """Output columns of an input row."""
        return len(self.columns)


def padded(channels: int) -> int:
    """The next multiple of `STEP_CHANNELS`."""
    return -(-channels // STEP_CHANNELS) * STEP_CHANNELS


def _pad(x: Tensor, dim: int) -> Tensor:
    size = x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (0, padded(size) - size))


def pad_last(x: Tensor) -> Tensor:
    """Pads the last dimension of [..., channels] with zeros to a multiple of `STEP_CHANNELS`."""
    return _pad(x, -1)


def pack(
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    snake: w.Snake | None = None,
    dilation: int = 1,
) -> Packed:
    """Rounds a layer to float16, each column scaled by a power of two of its own.

    Args:
        weight: float32 [columns, taps, channels]; multiples of 8 columns and 32 channels.
        bias: float32 [columns].
        scale: float32 [columns], applied to sum and bias.
        snake: The activation that follows, folded (`decoder.fold_snake`), [columns].
        dilation: Rows from one tap to the next.
    """
    columns, taps, channels = weight.shape
    _, exponent = torch.frexp(weight.abs().amax((1, 2)))
    unit = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    tiles = (weight / unit[:, None, None]).half().reshape(columns // 8, 8, taps, -1, 4, 8)
    zero = torch.zeros_like(unit)
    bias, scale = zero if bias is None else bias, zero + 1 if scale is None else scale
    alpha, beta = (zero, zero) if snake is None else (snake.alpha.flatten(), snake.beta.flatten())
    return Packed(
        tiles.permute(0, 3, 2, 1, 4, 5).flatten(3, 4).flatten(1, 2).contiguous(),
        torch.stack([unit * scale, bias * scale, alpha, beta], dim=1).contiguous(),
        taps,
        channels,
        dilation,
    )


def for_warpgroups(
    packed: Packed, tile_columns: int, *, rows: Literal["shared memory", "registers"]
) -> Tensor:
    """Packs a layer for csrc/codec/warpgroup_rows.cuh or residual_unit.cuh.

    Matrix instruction i of a step takes channels 8 t + 4 i to 8 t + 4 i + 3 of every t, as the
    instructions of the other kernels do. Lane t receives columns 2 t and 2 t + 1 of every eight;
    the columns are permuted so that of every 32 these are channels 8 t to 8 t + 7.

    Args:
        packed: The layer.
        tile_columns: Columns of a tile, a multiple of 32 that divides the layer's.
        rows: Where the other operand is. In shared memory, four channels are adjacent: a half of K
            has those of two t. In registers of lane t, two are: a half has two channels of every t.

    Returns:
        float16 [columns / tile_columns, steps, 2 instructions, 2 halves of K, tile_columns, 8].
    """
    steps = packed.taps * packed.channels // STEP_CHANNELS
    w = packed.weights.unflatten(2, (8, 4)).movedim(1, 2)  # [columns / 8, 8, steps, 4, 8]
    # [tile, 32 columns, t, pair, odd, step, ...]; the columns become [32 columns, pair, t, odd]
    w = w.reshape(-1, tile_columns // 32, 4, 4, 2, steps, STEP_CHANNELS)
    if rows == "registers":
        w = w.unflatten(-1, (4, 2, 2, 2))  # [t of K, instruction, half, channel]
        w = w.permute(0, 5, 7, 8, 1, 3, 2, 4, 6, 9)
    else:
        w = w.unflatten(-1, (2, 2, 2, 4))  # [half, t of K, instruction, channel]
        w = w.permute(0, 5, 8, 6, 1, 3, 2, 4, 7, 9)
    return w.flatten(4, 7).flatten(5, 6).contiguous()


def columns_for_warpgroups(packed: Packed) -> Tensor:
    """`Packed.columns` [columns, 4]: of every 32 columns, the first channel of each lane first."""
    return packed.columns.unflatten(0, (-1, 4, 8)).transpose(1, 2).flatten(0, 2).contiguous()


def linear(
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
) -> Packed:
    """A linear layer [out, in]; the weight of a norm in front of it is folded into the weights."""
    return pack((weight if norm is None else weight * norm)[:, None], bias, scale)


def _pad_snake(snake: w.Snake | None, repeats: int = 1) -> w.Snake | None:
    if snake is None:
        return None
    return w.Snake(_pad(snake.alpha, 0).repeat(repeats, 1), _pad(snake.beta, 0).repeat(repeats, 1))


def convolution(conv: w.Conv, snake: w.Snake | None = None) -> Packed:
    """A causal convolution and the folded snake after it."""
    assert conv.bias is not None and conv.groups == 1
    weight = _pad(_pad(conv.weight.transpose(1, 2), 0), 2)
    return pack(weight, _pad(conv.bias, 0), None, _pad_snake(snake), conv.dilation)


def transposed(conv: w.Conv, snake: w.Snake | None = None) -> Packed:
    """A transposed convolution of kernel s or 2s and the folded snake after it."""
    assert conv.bias is not None
    stride = conv.stride
    weight = conv.weight.unflatten(2, (-1, stride)).permute(3, 1, 2, 0).flip(2)
    weight = _pad(_pad(weight, 1), 3).flatten(0, 1)  # from [stride, out, taps, in]
    return pack(weight, _pad(conv.bias, 0).repeat(stride), None, _pad_snake(snake, stride))


def interleave_rope_rows(weight: Tensor, head_dim: int) -> Tensor:
    """Permutes the rows of [heads * head_dim, in]: the two rows of a rope pair become adjacent."""
    return interleave_rope_pairs(weight.t().unflatten(1, (-1, head_dim))).flatten(1).t()


def interleave_rope_pairs(x: Tensor) -> Tensor:
    """Permutes the channels of [..., head_dim]: i and i + head_dim / 2 become 2 i and 2 i + 1."""
    return x.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)
