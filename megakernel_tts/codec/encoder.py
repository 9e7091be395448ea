"""The codec's encoder: waveform to codes, with Mimi's architecture (Défossez et al., 2024).

Attention is causal over the whole recording, as in the reference implementation: the window of 250
steps in the configuration is not applied.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.layers import (
    apply_rope,
    exact_convolutions,
    linear,
    merge_heads,
    rope_table,
    split_heads,
)
from megakernel_tts.codec import weights as w
from megakernel_tts.model.config import CodecConfig


def _conv(conv: w.Conv, x: Tensor, mode: str = "constant") -> Tensor:
    """Causal convolution: pads on the left, and on the right to a whole number of strides."""
    left = conv.weight.shape[-1] - conv.stride
    right = -x.shape[-1] % conv.stride
    x = F.pad(x, (left, right), mode=mode)
    return F.conv1d(x, conv.weight, conv.bias, stride=conv.stride)


def _norm(norm: w.Norm, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps)


class Encoder:
    """The codec's encoder.

    Attributes:
        config: The encoder's configuration.
        samples_per_frame: Samples of a frame.
    """

    def __init__(self, weights: w.EncoderWeights, config: CodecConfig) -> None:
        """Uses the weights as they are, on their device."""
        self.config = config.encoder
        self.samples_per_frame = config.samples_per_frame
        self._w = weights

    @torch.inference_mode()
    def encode(self, wave: Tensor) -> Tensor:
        """Encodes a recording.

        Args:
            wave: [samples], float32 at 24 kHz in [-1, 1].

        Returns:
            Codes, int64 [ceil(samples / samples per frame), groups].

        Raises:
            FloatingPointError: The embedding is not finite.
        """
        with exact_convolutions(self._w.conv_in.weight.device):
            return self._encode(wave)

    def _encode(self, wave: Tensor) -> Tensor:
        weights = self._w
        x = _conv(weights.conv_in, wave[None, None].to(weights.conv_in.weight))
        for stage in weights.stages:
            x = x + _conv(stage.conv2, F.elu(_conv(stage.conv1, F.elu(x))))
            x = _conv(stage.down, F.elu(x))
        x = _conv(weights.conv_out, F.elu(x))
        x = self._transform(x.transpose(1, 2)).transpose(1, 2)
        x = _conv(weights.downsample, x, mode="replicate")
        if not bool(x.isfinite().all()):
            raise FloatingPointError("The codec encoder's embedding is not finite.")
        codes = [
            *self._quantize(weights.semantic, x),
            *self._quantize(weights.acoustic, x),
        ]
        return torch.stack(codes, dim=-1)[: math.ceil(len(wave) / self.samples_per_frame)]

    def _transform(self, x: Tensor) -> Tensor:
        stack = self.config.stack
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rope = rope_table(positions, stack.head_dim, stack.rope_theta, x.dtype)
        for layer in self._w.layers:
            normed = _norm(layer.input_norm, x, stack.norm_eps)
            q = apply_rope(split_heads(linear(normed, layer.q), stack.head_dim), rope)
            k = apply_rope(split_heads(linear(normed, layer.k), stack.head_dim), rope)
            v = split_heads(linear(normed, layer.v), stack.head_dim)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer.scale * linear(merge_heads(attended), layer.o)
            normed = _norm(layer.post_norm, x, stack.norm_eps)
            x = x + layer.mlp_scale * linear(F.gelu(linear(normed, layer.fc1)), layer.fc2)
        return x

    def _quantize(self, quantizer: w.Quantizer, x: Tensor) -> list[Tensor]:
        """Residual quantisation: each codebook quantises the residual of the previous ones."""
        residual = F.conv1d(x, quantizer.input)[0].t()  # [frames, dim]
        codes: list[Tensor] = []
        for book in quantizer.codebooks:
            entries = book.total / book.usage.clamp(min=1e-5)[:, None]
            nearest = torch.cdist(residual[None], entries[None])[0].argmin(dim=-1)
            residual = residual - entries[nearest]
            codes.append(nearest)
        return codes
