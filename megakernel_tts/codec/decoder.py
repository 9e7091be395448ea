"""The codec's streaming decoder in plain torch: codes to waveform, a few frames at a time.

Streaming gives the same waveform as decoding all frames at once: every layer is causal, and the
`State` carries the last columns of every convolution's input and the keys and values of the
attention window. The caller passes the state in and receives the next one; a `Decoder` holds only
weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.layers import (
    apply_rope,
    exact_convolutions,
    gated_mlp,
    linear,
    merge_heads,
    rms_norm,
    rope_table,
    split_heads,
)
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.convolutions import (
    Extend,
    by_taps,
    causal,
    history_length,
    transposed,
    transposed_by_taps,
)
from megakernel_tts.model.config import CodecConfig


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
        received: Codes of the first frames, int64 [frames, groups].
        pending: Host memory that receives the codes of the remaining frames, int32
            [frames, groups].
    """

    slot: int
    received: NDArray[np.int64]
    pending: NDArray[np.int32]

    @property
    def num_frames(self) -> int:
        """Known and pending frames."""
        return len(self.received) + len(self.pending)


@dataclass(frozen=True)
class State:
    """State of a batch of streams between two calls.

    Attributes:
        columns: The last columns of every convolution's input, in layer order, [batch, in, width];
            only of convolutions that read earlier columns.
        keys: Rotated keys of the last window - 1 frames, [layers, batch, heads, window - 1, dim].
        values: Values of the same frames, of the same shape.
        position: Frames decoded so far, [batch].
    """

    columns: tuple[Tensor, ...]
    keys: Tensor
    values: Tensor
    position: Tensor

    @staticmethod
    def stack(states: "Sequence[State]") -> "State":
        """Concatenates states along the batch."""
        return State(
            columns=tuple(
                torch.cat(columns) for columns in zip(*(s.columns for s in states), strict=True)
            ),
            keys=torch.cat([s.keys for s in states], dim=1),
            values=torch.cat([s.values for s in states], dim=1),
            position=torch.cat([s.position for s in states]),
        )

    def split(self) -> "list[State]":
        """Splits a batch into states that share no memory, so that each can be freed alone."""
        return [
            State(
                columns=tuple(c[i : i + 1].clone() for c in self.columns),
                keys=self.keys[:, i : i + 1].clone(),
                values=self.values[:, i : i + 1].clone(),
                position=self.position[i : i + 1].clone(),
            )
            for i in range(len(self.position))
        ]


class _Histories:
    """Reads the columns of a state in layer order and collects those of the next state."""

    def __init__(self, columns: tuple[Tensor, ...]) -> None:
        self._old = iter(columns)
        self.new: list[Tensor] = []

    def extend(self, x: Tensor) -> Tensor:
        """Prepends a layer's history to x [batch, channels, time] and stores the next history."""
        old = next(self._old)
        x = torch.cat([old, x], dim=-1)
        # A copy: a view would keep all of x allocated.
        self.new.append(x[..., x.shape[-1] - old.shape[-1] :].clone())
        return x


def _snake(snake: w.Snake, x: Tensor) -> Tensor:
    """SnakeBeta: x + sin^2(a x) / b, of folded parameters a and 1 / b (`fold_snake`)."""
    y = (x * snake.alpha).sin_().square_()  # in place: new memory costs more than the arithmetic
    return y.mul_(snake.beta).add_(x)


def fold_snake(snake: w.Snake) -> w.Snake:
    """Replaces the logarithms alpha and beta by e^alpha and 1 / e^beta, [channels, 1]."""
    return w.Snake(snake.alpha.exp()[:, None], 1.0 / (snake.beta.exp()[:, None] + 1e-9))


def codebook_tables(weights: w.DecoderWeights) -> Tensor:
    """The projected vectors of every codebook, [groups, codes, dim]."""
    projected = [
        (book.total / book.usage.clamp(min=1e-5)[:, None]) @ out[:, :, 0].t()
        for book, out in [
            (weights.first, weights.first_out),
            *((book, weights.rest_out) for book in weights.rest),
        ]
    ]
    return torch.stack(projected)


def _prepare(weights: w.DecoderWeights) -> w.DecoderWeights:
    """Folds the snakes, and orders the convolutions' weights for `convolutions`."""
    upsample = tuple(
        replace(up, transposed=transposed_by_taps(up.transposed)) for up in weights.upsample
    )
    blocks = tuple(
        w.DecoderBlock(
            fold_snake(block.snake),
            transposed_by_taps(block.transposed),
            tuple(
                w.Residual(
                    fold_snake(r.snake1), by_taps(r.conv1), fold_snake(r.snake2), by_taps(r.conv2)
                )
                for r in block.residuals
            ),
        )
        for block in weights.blocks
    )
    return replace(
        weights,
        pre_conv=by_taps(weights.pre_conv),
        upsample=upsample,
        conv_in=by_taps(weights.conv_in),
        blocks=blocks,
        snake=fold_snake(weights.snake),
        conv_out=by_taps(weights.conv_out),
    )


class Decoder:
    """The codec's decoder; one instance serves any number of streams.

    Attributes:
        config: The decoder's configuration.
        samples_per_frame: Samples of a frame.
        sample_rate: In Hz.
    """

    def __init__(self, weights: w.DecoderWeights, config: CodecConfig) -> None:
        """Folds the weights' constants; float32 tensors on the decoder's device."""
        self.config = config.decoder
        self.samples_per_frame = config.samples_per_frame
        self.sample_rate = config.sample_rate
        self._w = _prepare(weights)
        self._tables = codebook_tables(weights)

    @torch.inference_mode()
    def start(self, batch: int = 1) -> State:
        """The state before the first frame: histories of zeros."""
        config, weights = self.config, self._w
        device = self._tables.device
        widths: list[tuple[int, int]] = [(config.codebook_dim, history_length(weights.pre_conv))]
        widths += [
            (config.latent_dim, history_length(up.convnext.depthwise)) for up in weights.upsample
        ]
        widths.append((config.latent_dim, history_length(weights.conv_in)))
        for block in weights.blocks:
            into, out, _ = block.transposed.weight.shape
            widths.append((into, 1))
            widths += [(out, history_length(r.conv1)) for r in block.residuals]
        widths.append((weights.conv_out.weight.shape[1], history_length(weights.conv_out)))
        stack = config.stack
        window = (
            stack.num_layers,
            batch,
            stack.num_kv_heads,
            config.sliding_window - 1,
            stack.head_dim,
        )
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
            state: The state that the last call returned, or `start`.

        Returns:
            The waveform [batch, frames * samples per frame] in [-1, 1], and the next state.

        Raises:
            FloatingPointError: The waveform is not finite.
        """
        with exact_convolutions(codes.device):
            wave, after = self._decode(codes, state)
        if not bool(wave.isfinite().all()):
            raise FloatingPointError("The codec's waveform is not finite.")
        return wave, after

    def _decode(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        weights, histories = self._w, _Histories(state.columns)
        extend = histories.extend
        groups = torch.arange(self._tables.shape[0], device=codes.device)
        x = self._tables[groups, codes].sum(dim=-2)  # [batch, frames, dim]
        x = causal(weights.pre_conv, x.transpose(1, 2), extend).transpose(1, 2)
        x, keys, values = self._transform(x, state)
        x = x.transpose(1, 2)
        for up in weights.upsample:
            x = self._convnext(up.convnext, transposed(up.transposed, x, extend), extend)
        x = causal(weights.conv_in, x, extend)
        for block in weights.blocks:
            x = transposed(block.transposed, _snake(block.snake, x), extend)
            for r in block.residuals:
                y = causal(r.conv1, _snake(r.snake1, x), extend)
                x = causal(r.conv2, _snake(r.snake2, y), extend).add_(x)
        x = causal(weights.conv_out, _snake(weights.snake, x), extend)
        position = state.position + codes.shape[1]
        return x.clamp(-1, 1)[:, 0], State(tuple(histories.new), keys, values, position)

    def _convnext(self, block: w.ConvNext, x: Tensor, extend: Extend) -> Tensor:
        y = causal(block.depthwise, x, extend).transpose(1, 2)
        y = F.layer_norm(y, y.shape[-1:], block.norm.weight, block.norm.bias, eps=1e-6)
        y = F.gelu(linear(y, block.up, block.up_bias))
        return x + (block.gamma * linear(y, block.down, block.down_bias)).transpose(1, 2)

    def _transform(self, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """The sliding-window transformer, [batch, frames, latent]; also returns keys and values."""
        weights, stack, window = self._w, self.config.stack, self.config.sliding_window
        frames = x.shape[1]
        positions = state.position[:, None] + torch.arange(frames, device=x.device)
        past = state.position[:, None] + torch.arange(1 - window, 0, device=x.device)
        key_positions = torch.cat([past, positions], dim=1)[:, None, :]  # [batch, 1, keys]
        query_positions = positions[:, :, None]  # [batch, frames, 1]
        visible = (key_positions >= 0) & (key_positions <= query_positions)
        visible &= key_positions > query_positions - window
        rope = rope_table(positions, stack.head_dim, stack.rope_theta, x.dtype)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        x = linear(x, weights.input, weights.input_bias)
        for i, layer in enumerate(weights.layers):
            normed = rms_norm(x, layer.input_norm, stack.norm_eps)
            q = apply_rope(split_heads(linear(normed, layer.q), stack.head_dim), rope)
            k = apply_rope(split_heads(linear(normed, layer.k), stack.head_dim), rope)
            k = torch.cat([state.keys[i], k], dim=2)
            v = torch.cat(
                [state.values[i], split_heads(linear(normed, layer.v), stack.head_dim)], dim=2
            )
            scores = q @ k.transpose(2, 3) / math.sqrt(stack.head_dim)
            scores = scores.masked_fill(~visible[:, None], -torch.inf)
            attended = merge_heads(scores.softmax(dim=-1) @ v)
            x = x + layer.scale * linear(attended, layer.o)
            normed = rms_norm(x, layer.post_norm, stack.norm_eps)
            x = x + layer.mlp_scale * gated_mlp(normed, layer.gate, layer.up, layer.down)
            keys.append(k[:, :, 1 - window :])
            values.append(v[:, :, 1 - window :])
        x = rms_norm(x, weights.norm, stack.norm_eps)
        x = linear(x, weights.output, weights.output_bias)
        return x, torch.stack(keys), torch.stack(values)
