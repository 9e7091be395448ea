"""Convolutions and activations for training, channels last: [batch, time, channels].

The networks are narrow and their signals are long, for which cuDNN's convolutions are slow. Here a
convolution is one matrix product over shifted columns. The gradient of its weights, a sum over
millions of rows, is split into partial sums. Weights keep the checkpoint's layout.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_voice.training import fused
from megakernel_tts.codec import weights as w

_MIN_SPLIT_ROWS = 16_384  # of a product whose sum is split


def _columns(x: Tensor, kernel: int, dilation: int, *, ahead: bool = False) -> Tensor:
    """Receptive field before (or after) each position: [batch, time, kernel * channels]."""
    time, reach = x.shape[1], (kernel - 1) * dilation
    padded = F.pad(x, (0, 0, 0, reach) if ahead else (0, 0, reach, 0))
    return torch.cat([padded[:, i * dilation : i * dilation + time] for i in range(kernel)], -1)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """`a^T b` for tall a [rows, n] and b [rows, m], in float32."""
    rows, parts = a.shape[0], 256
    while rows % parts:
        parts //= 2
    if rows < _MIN_SPLIT_ROWS or parts == 1:
        return (a.t() @ b).float()
    split = torch.bmm(a.view(parts, rows // parts, -1).mT, b.reshape(parts, rows // parts, -1))
    return split.float().sum(0)


class _Product(torch.autograd.Function):
    """x [batch, time, in] times weight [in, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return grad @ weight.t(), _outer(x.flatten(0, 1), grad.flatten(0, 1))


class _Dilated(torch.autograd.Function):
    """Causal convolution of x [batch, time, in] with weight [out, in, kernel]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dilation: int) -> Tensor:
        weight = weight.to(x.dtype)
        ctx.dilation = dilation
        ctx.save_for_backward(x, weight)
        flat = weight.permute(2, 1, 0).flatten(0, 1)
        return _columns(x, weight.shape[2], dilation) @ flat

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight = ctx.saved_tensors
        out, into, kernel = weight.shape
        grad = grads[0].to(x.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            # The transpose of a causal convolution is anti-causal.
            ahead = _columns(grad, kernel, ctx.dilation, ahead=True)
            grad_x = ahead @ weight.flip(2).permute(2, 0, 1).flatten(0, 1)
        columns = _columns(x, kernel, ctx.dilation)
        grad_w = _outer(columns.flatten(0, 1), grad.flatten(0, 1))
        return grad_x, grad_w.view(kernel, into, out).permute(2, 1, 0), None


def _snake(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    wave = torch.sin(x * alpha.exp())
    return torch.addcmul(x.float(), wave * wave, 1 / (beta.exp() + 1e-9)).to(x.dtype)


def _snake_grads(
    x: Tensor, alpha: Tensor, beta: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    inverse, wide = 1 / (beta.exp() + 1e-9), grad.float()
    phase = x * alpha.exp()
    slope = wide * torch.sin(2 * phase)
    grad_x = torch.addcmul(wide, slope, alpha.exp() * inverse).to(grad.dtype)
    grad_alpha = (slope * phase).sum((0, 1)) * inverse
    grad_beta = -(wide * torch.sin(phase).square()).sum((0, 1)) * inverse
    return grad_x, grad_alpha, grad_beta


class _Snake(torch.autograd.Function):
    """x + sin^2(e^alpha x) / e^beta; saves only x for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha, beta)
        run = fused(_snake, x.device)
        return run(x.detach(), alpha.detach(), beta.detach())  # one compilation for all callers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, alpha, beta = (saved.detach() for saved in ctx.saved_tensors)
        run = fused(_snake_grads, x.device)
        return run(x, alpha, beta, grads[0])


def snake(x: Tensor, s: w.Snake) -> Tensor:
    """Applies the periodic activation x + sin^2(e^alpha x) / e^beta."""
    return _Snake.apply(x, s.alpha, s.beta)  # pyright: ignore[reportReturnType]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [batch, time, in] times weight [in, out]."""
    return _Product.apply(x, weight)  # pyright: ignore[reportReturnType]


def conv(x: Tensor, c: w.Conv, *, replicate: bool = False) -> Tensor:
    """A causal convolution; with a stride its kernel is twice the stride.

    Args:
        x: [batch, time, in], time a multiple of the stride.
        c: The convolution.
        replicate: Whether the input is padded with its first column instead of zeros.
    """
    weight = c.weight
    kernel = weight.shape[2]
    if c.stride > 1:
        chunks = x.unflatten(1, (-1, c.stride)).flatten(2)
        first = x[:, :1].repeat(1, 1, c.stride) if replicate else torch.zeros_like(chunks[:, :1])
        before = torch.cat([first, chunks[:, :-1]], 1)
        y = product(torch.cat([before, chunks], -1), weight.permute(2, 1, 0).flatten(0, 1))
    elif c.groups > 1:
        padded = F.pad(x, (0, 0, kernel - 1, 0))
        taps = weight[:, 0].to(x.dtype)
        y = sum(padded[:, i : i + x.shape[1]] * taps[:, i] for i in range(kernel))
        assert isinstance(y, Tensor)
    elif kernel == 1:
        y = product(x, weight[:, :, 0].t())
    else:
        y = _Dilated.apply(x, weight, c.dilation)
        assert isinstance(y, Tensor)
    return y if c.bias is None else y + c.bias.to(x.dtype)


def transposed(x: Tensor, c: w.Conv) -> Tensor:
    """A causal transposed convolution whose kernel is the stride or twice the stride."""
    into, out, kernel = c.weight.shape
    s = c.stride
    weight = c.weight[:, :, :s].permute(0, 2, 1).reshape(into, s * out)
    if kernel > s:
        late = c.weight[:, :, s:].permute(0, 2, 1).reshape(into, s * out)
        x = torch.cat([x, F.pad(x, (0, 0, 1, 0))[:, :-1]], -1)
        weight = torch.cat([weight, late])
    y = product(x, weight).unflatten(2, (s, out)).flatten(1, 2)
    assert c.bias is not None
    return y + c.bias.to(x.dtype)
