"""Codes -> waveform, a few frames at a time: streaming equals decoding the whole.

Everything is causal, so a stream is exact if each layer is given the last columns of its own
input: that, and the last keys and values of the attention window, is the `State`. It is passed in
and a new one is passed out; nothing is kept here but weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.codec import weights as w
from megakernel_tts.model.config import CodecConfig
from megakernel_tts.model.layers import (
    exact_convolutions,
    gated_mlp,
    linear,
    merge_heads,
    rms_norm,
    rotary,
    rotate,
    split_heads,
)


class DecodeRequest(NamedTuple):
    """The next frames of one stream.

    Attributes:
        slot: The stream's slot in the vocoder.
        codes: int64 [frames, groups] on the host.
    """

    slot: int
    codes: Tensor


class PendingDecodeRequest(NamedTuple):
    """The next frames of one stream; the codes of the last ones are not written yet.

    Attributes:
        slot: The stream's slot in the vocoder.
        known: Codes of the first frames, int64 [frames, groups].
        pending: Host memory that receives the codes of the remaining frames, int32
            [frames, groups].
    """

    slot: int
    known: NDArray[np.int64]
    pending: NDArray[np.int32]

    @property
    def num_frames(self) -> int:
        """Known and pending frames."""
        return len(self.known) + len(self.pending)


@dataclass(frozen=True)
class State:
    """What a stream carries from one call to the next.

    Attributes:
        columns: For every convolution with a memory, in order: its last inputs [batch, in, width].
        keys: Turned keys of the last window - 1 frames, [layers, batch, heads, window - 1, dim].
        values: The values of the same frames.
        position: Frames decoded so far, [batch].
    """

    columns: tuple[Tensor, ...]
    keys: Tensor
    values: Tensor
    position: Tensor

    @staticmethod
    def stack(states: "Sequence[State]") -> "State":
        """Joins streams into one batch."""
        return State(
            columns=tuple(
                torch.cat(parts) for parts in zip(*(s.columns for s in states), strict=True)
            ),
            keys=torch.cat([s.keys for s in states], dim=1),
            values=torch.cat([s.values for s in states], dim=1),
            position=torch.cat([s.position for s in states]),
        )

    def split(self) -> "list[State]":
        """Takes a batch apart into streams, which share no memory: one may outlive the others."""
        return [
            State(
                columns=tuple(c[i : i + 1].clone() for c in self.columns),
                keys=self.keys[:, i : i + 1].clone(),
                values=self.values[:, i : i + 1].clone(),
                position=self.position[i : i + 1].clone(),
            )
            for i in range(len(self.position))
        ]


class _Memory:
    """The columns of a state, taken one by one in layer order, and the new ones in their place."""

    def __init__(self, columns: tuple[Tensor, ...]) -> None:
        self._old = iter(columns)
        self.new: list[Tensor] = []

    def extend(self, x: Tensor) -> Tensor:
        """Puts a layer's remembered columns before x and remembers x's last ones."""
        old = next(self._old)
        x = torch.cat([old, x], dim=-1)
        # A copy: a view would keep the whole of x alive for as long as the stream lives.
        self.new.append(x[..., x.shape[-1] - old.shape[-1] :].clone())
        return x


def _memory(conv: w.Conv) -> int:
    """Columns of its input that a causal convolution must remember."""
    return (conv.weight.shape[-1] - 1) * conv.dilation


def _causal(conv: w.Conv, x: Tensor, memory: _Memory) -> Tensor:
    if conv.weight.shape[-1] > 1:
        x = memory.extend(x)
    return F.conv1d(x, conv.weight, conv.bias, dilation=conv.dilation, groups=conv.groups)


def _transposed(conv: w.Conv, x: Tensor, memory: _Memory) -> Tensor:
    """Stride-s transposed convolution of kernel s or 2s: output column t needs inputs t and t-1."""
    s, kernel = conv.stride, conv.weight.shape[-1]
    if kernel == s:
        return F.conv_transpose1d(x, conv.weight, conv.bias, stride=s)
    y = F.conv_transpose1d(memory.extend(x), conv.weight, conv.bias, stride=s)
    return y[..., s : y.shape[-1] - (kernel - s)]


def _snake(snake: w.Snake, x: Tensor) -> Tensor:
    """SnakeBeta: x + sin^2(a x) / b; `Decoder` has folded a = e^alpha and 1/b into the tensors."""
    return x + torch.sin(x * snake.alpha).square() * snake.beta


def fold_snake(snake: w.Snake) -> w.Snake:
    """The factors themselves in place of their logarithms: a = e^alpha, and 1/b; [channels, 1]."""
    return w.Snake(snake.alpha.exp()[:, None], 1.0 / (snake.beta.exp()[:, None] + 1e-9))


def codebook_tables(weights: w.Decoder) -> Tensor:
    """Every codebook's vectors behind its projection, [groups, codes, dim]."""
    projected = [
        (book.total / book.usage.clamp(min=1e-5)[:, None]) @ out[:, :, 0].t()
        for book, out in [
            (weights.first, weights.first_out),
            *((book, weights.rest_out) for book in weights.rest),
        ]
    ]
    return torch.stack(projected)


class Decoder:
    """The codec's decoder; one instance serves any number of streams."""

    def __init__(self, weights: w.Decoder, config: CodecConfig) -> None:
        self.config = config.decoder
        self.frame = config.samples_per_frame  # samples
        self.sample_rate = config.sample_rate
        self._w = weights
        self._tables = codebook_tables(weights)
        self._blocks = [
            w.Block(
                fold_snake(block.snake),
                block.transposed,
                tuple(
                    w.Residual(fold_snake(r.snake1), r.conv1, fold_snake(r.snake2), r.conv2)
                    for r in block.residuals
                ),
            )
            for block in weights.blocks
        ]
        self._last_snake = fold_snake(weights.snake)

    @torch.inference_mode()
    def start(self, batch: int = 1) -> State:
        """The state before the first frame: empty histories, no frames."""
        c, weights = self.config, self._w
        device = self._tables.device
        widths: list[tuple[int, int]] = [(c.codebook_dim, _memory(weights.pre_conv))]
        widths += [(c.latent_dim, _memory(up.convnext.depthwise)) for up in weights.upsample]
        widths.append((c.latent_dim, _memory(weights.conv_in)))
        for block in weights.blocks:
            into, out, _ = block.transposed.weight.shape
            widths.append((into, 1))
            widths += [(out, _memory(r.conv1)) for r in block.residuals]
        widths.append((weights.conv_out.weight.shape[1], _memory(weights.conv_out)))
        s = c.stack
        window = (s.num_layers, batch, s.num_kv_heads, c.sliding_window - 1, s.head_dim)
        return State(
            columns=tuple(torch.zeros(batch, n, width, device=device) for n, width in widths),
            keys=torch.zeros(window, device=device),
            values=torch.zeros(window, device=device),
            position=torch.zeros(batch, dtype=torch.long, device=device),
        )

    @torch.inference_mode()
    def decode(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        """Decodes the next frames of a batch of streams.

        Args:
            codes: [batch, frames, groups], each below the codebook's size.
            state: What the last call gave back, or `start`.

        Returns:
            The waveform [batch, frames * samples a frame] in [-1, 1], and the state after it.

        Raises:
            FloatingPointError: The waveform is not finite: a weight is broken.
        """
        with exact_convolutions(codes.device):
            wave, after = self._decode(codes, state)
        if not bool(wave.isfinite().all()):
            raise FloatingPointError("The codec's waveform is not finite.")
        return wave, after

    def _decode(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        weights, memory = self._w, _Memory(state.columns)
        groups = torch.arange(self._tables.shape[0], device=codes.device)
        x = self._tables[groups, codes].sum(dim=-2)  # [batch, frames, dim]
        x = _causal(weights.pre_conv, x.transpose(1, 2), memory).transpose(1, 2)
        x, keys, values = self._transform(x, state)
        x = x.transpose(1, 2)
        for up in weights.upsample:
            x = self._convnext(up.convnext, _transposed(up.transposed, x, memory), memory)
        x = _causal(weights.conv_in, x, memory)
        for block in self._blocks:
            x = _transposed(block.transposed, _snake(block.snake, x), memory)
            for r in block.residuals:
                y = _causal(r.conv1, _snake(r.snake1, x), memory)
                x = x + _causal(r.conv2, _snake(r.snake2, y), memory)
        x = _causal(weights.conv_out, _snake(self._last_snake, x), memory)
        position = state.position + codes.shape[1]
        return x.clamp(-1, 1)[:, 0], State(tuple(memory.new), keys, values, position)

    def _convnext(self, block: w.ConvNext, x: Tensor, memory: _Memory) -> Tensor:
        y = _causal(block.depthwise, x, memory).transpose(1, 2)
        y = F.layer_norm(y, y.shape[-1:], block.norm.weight, block.norm.bias, eps=1e-6)
        y = F.gelu(linear(y, block.up, block.up_bias))
        return x + (block.gamma * linear(y, block.down, block.down_bias)).transpose(1, 2)

    def _transform(self, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """The windowed transformer; x is [batch, frames, latent]."""
        weights, s, window = self._w, self.config.stack, self.config.sliding_window
        frames = x.shape[1]
        positions = state.position[:, None] + torch.arange(frames, device=x.device)
        past = state.position[:, None] + torch.arange(1 - window, 0, device=x.device)
        seen = torch.cat([past, positions], dim=1)[:, None, :]  # [batch, 1, keys]
        query = positions[:, :, None]  # [batch, frames, 1]
        visible = (seen >= 0) & (seen <= query) & (seen > query - window)
        turn = rotary(positions, s.head_dim, s.rope_theta, x.dtype)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        x = linear(x, weights.input, weights.input_bias)
        for i, layer in enumerate(weights.layers):
            n = rms_norm(x, layer.input_norm, s.norm_eps)
            q = rotate(split_heads(linear(n, layer.q), s.head_dim), turn)
            k = rotate(split_heads(linear(n, layer.k), s.head_dim), turn)
            k = torch.cat([state.keys[i], k], dim=2)
            v = torch.cat([state.values[i], split_heads(linear(n, layer.v), s.head_dim)], dim=2)
            scores = q @ k.transpose(2, 3) / math.sqrt(s.head_dim)
            scores = scores.masked_fill(~visible[:, None], -torch.inf)
            attended = merge_heads(scores.softmax(dim=-1) @ v)
            x = x + layer.scale * linear(attended, layer.o)
            n = rms_norm(x, layer.post_norm, s.norm_eps)
            x = x + layer.mlp_scale * gated_mlp(n, layer.gate, layer.up, layer.down)
            keys.append(k[:, :, 1 - window :])
            values.append(v[:, :, 1 - window :])
        x = rms_norm(x, weights.norm, s.norm_eps)
        x = linear(x, weights.output, weights.output_bias)
        return x, torch.stack(keys), torch.stack(values)
