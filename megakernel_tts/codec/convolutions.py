"""Causal convolutions of the decoder: on a CPU as matrix products, one for each tap of the kernel.

torch's convolutions on a CPU bring weights and columns into another order in every call. This takes
longer than the arithmetic where a call has few columns, as a frame has.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_tts.codec import weights as w

# Prepends the columns that a layer kept of earlier calls to x [batch, in, time].
Extend = Callable[[Tensor], Tensor]


def history_length(conv: w.Conv) -> int:
    """Columns before the current one that a causal convolution reads."""
    return (conv.weight.shape[-1] - 1) * conv.dilation


def by_taps(conv: w.Conv) -> w.Conv:
    """Orders a convolution's weight in memory for `causal`, on a CPU; its values are the same."""
    if conv.weight.is_cuda:
        return conv
    return replace(conv, weight=conv.weight.permute(2, 0, 1).contiguous().permute(1, 2, 0))


def transposed_by_taps(conv: w.Conv) -> w.Conv:
    """Orders the weight of a transposed convolution in memory for `transposed`, on a CPU."""
    if conv.weight.is_cuda:
        return conv
    return replace(conv, weight=conv.weight.permute(2, 1, 0).contiguous().permute(2, 1, 0))


def causal(conv: w.Conv, x: Tensor, extend: Extend) -> Tensor:
    """Computes `y[t] = b + sum over k of W[k] x[t + k * dilation]`, with the history before x.

    Args:
        conv: A convolution of stride 1, from `by_taps`.
        x: [batch, in, time].
        extend: Prepends the history to x; called only if the convolution reads earlier columns.

    Returns:
        [batch, out, time].
    """
    num_columns, kernel = x.shape[-1], conv.weight.shape[-1]
    if kernel > 1:
        x = extend(x)
    if x.is_cuda or conv.groups > 1:
        return F.conv1d(x, conv.weight, conv.bias, dilation=conv.dilation, groups=conv.groups)
    windows = x.unfold(-1, num_columns, conv.dilation).unbind(2)  # one for each tap
    return _sum_of_products(conv.bias, conv.weight.permute(2, 0, 1), windows)


def transposed(conv: w.Conv, x: Tensor, extend: Extend) -> Tensor:
    """Transposed convolution of stride s and kernel s or 2 s: s output columns for each of x.

    Output column s t + i is `b + W[i] x[t]`, and with kernel 2 s `+ W[i + s] x[t - 1]`.

    Args:
        conv: From `transposed_by_taps`.
        x: [batch, in, time].
        extend: As in `causal`.

    Returns:
        [batch, out, s * time].
    """
    stride, num_columns = conv.stride, x.shape[-1]
    num_inputs = conv.weight.shape[-1] // stride  # that an output column depends on
    if num_inputs > 1:
        x = extend(x)
    if x.is_cuda:
        y = F.conv_transpose1d(x, conv.weight, conv.bias, stride=stride)
        return y[..., (num_inputs - 1) * stride :][..., : stride * num_columns]
    windows = x.unfold(-1, num_columns, 1).unbind(2)  # the earlier input column first
    taps = conv.weight.permute(2, 1, 0).unflatten(0, (num_inputs, stride)).flatten(1, 2)
    bias = None if conv.bias is None else conv.bias.repeat(stride)
    y = _sum_of_products(bias, taps, windows[::-1])  # [batch, s * out, time]
    return y.unflatten(1, (stride, -1)).permute(0, 2, 3, 1).flatten(2)


def _sum_of_products(bias: Tensor | None, matrices: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Sums the products of matrices [number, out, in] with columns [batch, in, time] each."""
    batch = columns[0].shape[0]
    first, *others = matrices[:, None].expand(-1, batch, -1, -1).unbind()
    if bias is None:
        y = torch.bmm(first, columns[0])
    else:
        y = torch.baddbmm(bias[:, None], first, columns[0])
    for matrix, x in zip(others, columns[1:], strict=True):
        y.baddbmm_(matrix, x)
    return y
