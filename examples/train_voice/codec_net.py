"""The codec's networks for training, with the same trees of tensors as the engine's."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_voice.operations import conv, snake, transposed
from megakernel_common.layers import apply_rope, merge_heads, rms_norm, rope_table, split_heads
from megakernel_tts.codec import weights as w
from megakernel_tts.model.config import CodecConfig, StackConfig

_FIRST_SHORTENED = 2  # block before which a signal is shortened; most work is in the later ones
_CONTEXT = 40  # columns there that precede a waveform's first sample in its receptive field


class _Net:
    """Convolutions of both networks.

    Attributes:
        calibrating: Whether a forward pass scales every convolution's weights to a given standard
            deviation of its output. The usual initialisation attenuates a signal by about 0.6 per
            layer: the output of a deep encoder would be its biases, and a decoder would be silent.
        fast: Type of the activations, except at the full sample rate.
    """

    def __init__(self, fast: torch.dtype) -> None:
        self.calibrating = False
        self.fast = fast

    def conv(
        self, x: Tensor, c: w.Conv, deviation: float = 1.0, *, replicate: bool = False
    ) -> Tensor:
        return self._calibrated(conv(x, c, replicate=replicate), c, deviation)

    def transposed(self, x: Tensor, c: w.Conv) -> Tensor:
        return self._calibrated(transposed(x, c), c, 1.0)

    def _calibrated(self, y: Tensor, c: w.Conv, deviation: float) -> Tensor:
        if not self.calibrating:
            return y
        scale = deviation / (y.float().std() + 1e-8)
        with torch.no_grad():
            c.weight.mul_(scale)
        return y * scale.to(y.dtype)


def _attend(
    x: Tensor, layer: w.EncoderLayer | w.DecoderLayer, s: StackConfig, window: int
) -> Tensor:
    """Causal attention over the last `window` positions."""
    positions = torch.arange(x.shape[1], device=x.device)
    rope = rope_table(positions[None], s.head_dim, s.rope_theta, x.dtype)
    q, k, v = (
        split_heads(F.linear(x, p.to(x.dtype)), s.head_dim) for p in (layer.q, layer.k, layer.v)
    )
    distance = positions[:, None] - positions
    mask = (distance >= 0) & (distance < window)
    y = F.scaled_dot_product_attention(apply_rope(q, rope), apply_rope(k, rope), v, attn_mask=mask)
    return layer.scale.to(x.dtype) * F.linear(merge_heads(y), layer.o.to(x.dtype))


def _norm(x: Tensor, norm: w.Norm, eps: float) -> Tensor:
    return F.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, eps).to(x.dtype)


class EncoderNet(_Net):
    """Waveform [batch, samples] -> embedding [batch, frames, hidden]."""

    def __init__(self, tree: w.EncoderWeights, config: CodecConfig, fast: torch.dtype) -> None:
        super().__init__(fast)
        self._w, self._stack = tree, config.encoder.stack

    def __call__(self, wave: Tensor) -> Tensor:
        """Computes the embedding in float32."""
        tree, s = self._w, self._stack
        x = self.conv(wave[..., None].to(self.fast), tree.conv_in)
        for stage in tree.stages:
            y = self.conv(F.elu(x), stage.conv1)
            x = x + self.conv(F.elu(y), stage.conv2, deviation=0.3)
            x = self.conv(F.elu(x), stage.down)
        x = self.conv(F.elu(x), tree.conv_out)
        for layer in tree.layers:
            x = x + _attend(_norm(x, layer.input_norm, s.norm_eps), layer, s, window=1 << 30)
            n = _norm(x, layer.post_norm, s.norm_eps)
            n = F.linear(F.gelu(F.linear(n, layer.fc1.to(x.dtype))), layer.fc2.to(x.dtype))
            x = x + layer.mlp_scale.to(x.dtype) * n
        return self.conv(x, tree.downsample, replicate=True).float()


class DecoderNet(_Net):
    """Quantised vectors [batch, frames, dim] -> waveform [batch, samples]."""

    def __init__(self, tree: w.DecoderWeights, config: CodecConfig, fast: torch.dtype) -> None:
        super().__init__(fast)
        self._w, self._config = tree, config.decoder
        self._samples_per_frame = config.samples_per_frame

    def __call__(self, q: Tensor, last: int | None = None) -> Tensor:
        """Computes the waveform in float32.

        Args:
            q: Quantised vectors.
            last: Number of frames at the end whose waveform is computed; fewer than all. The
                earlier ones are their context.
        """
        tree, frames = self._w, q.shape[1]
        x = self._transform(self.conv(q.to(self.fast), tree.pre_conv))
        for up in tree.upsample:
            x = self._convnext(self.transposed(x, up.transposed), up.convnext)
        x = self.conv(x, tree.conv_in)
        for i, block in enumerate(tree.blocks):
            if i == _FIRST_SHORTENED and last is not None:
                x = x[:, -(x.shape[1] // frames * last + _CONTEXT) :]
            if i == len(tree.blocks) - 1:
                x = x.float()  # bfloat16 would add noise to the waveform
            x = self.transposed(snake(x, block.snake), block.transposed)
            for r in block.residuals:
                y = snake(self.conv(snake(x, r.snake1), r.conv1), r.snake2)
                x = x + self.conv(y, r.conv2, deviation=0.3)
        wave = self.conv(snake(x, tree.snake), tree.conv_out, deviation=0.1)[..., 0]
        return wave if last is None else wave[:, -last * self._samples_per_frame :]

    def _transform(self, x: Tensor) -> Tensor:
        tree, s, window = self._w, self._config.stack, self._config.sliding_window
        dtype = x.dtype
        x = F.linear(x, tree.input.to(dtype), tree.input_bias.to(dtype))
        for layer in tree.layers:
            x = x + _attend(rms_norm(x, layer.input_norm, s.norm_eps).to(dtype), layer, s, window)
            n = rms_norm(x, layer.post_norm, s.norm_eps).to(dtype)
            gate = F.silu(F.linear(n, layer.gate.to(dtype)))
            n = F.linear(gate * F.linear(n, layer.up.to(dtype)), layer.down.to(dtype))
            x = x + layer.mlp_scale.to(dtype) * n
        x = rms_norm(x, tree.norm, s.norm_eps).to(dtype)
        return F.linear(x, tree.output.to(dtype), tree.output_bias.to(dtype))

    def _convnext(self, x: Tensor, c: w.ConvNext) -> Tensor:
        y = _norm(self.conv(x, c.depthwise), c.norm, 1e-6)
        y = F.gelu(F.linear(y, c.up.to(x.dtype), c.up_bias.to(x.dtype)))
        y = F.linear(y, c.down.to(x.dtype), c.down_bias.to(x.dtype))
        return x + c.gamma.to(x.dtype) * y


class Quantized(NamedTuple):
    """Result of a training step's quantisation, with straight-through gradients.

    Attributes:
        semantic: The semantic projection [rows, dim].
        acoustic: The acoustic projection [rows, dim], by the codebooks that a row uses.
        commitment: Loss of the projections' distances from the entries, a scalar.
    """

    semantic: Tensor
    acoustic: Tensor
    commitment: Tensor


class Quantizer:
    """Residual vector quantiser, trained by moving averages of the vectors of each entry.

    Codebook 0 quantises the semantic projection, the others the residual of the acoustic one.

    Attributes:
        books: [groups, codes, dim].
    """

    def __init__(self, groups: int, codes: int, dim: int, device: torch.device) -> None:
        self.books = torch.zeros(groups, codes, dim, device=device)
        self._sums = torch.zeros_like(self.books)
        self._usage = torch.ones(groups, codes, device=device)
        self._last_inputs = torch.zeros(groups, 1, dim, device=device)
        self._num_inputs = torch.ones(groups, device=device)

    def load(self, books: Tensor) -> None:
        """Loads trained codebooks."""
        self.books.copy_(books)
        self._sums.copy_(books)

    @torch.no_grad()
    def encode(self, semantic: Tensor, acoustic: Tensor) -> Tensor:
        """Encodes the two projections [rows, dim] into codes [rows, groups]."""
        return self._chain(semantic, acoustic)[0].t()

    def _chain(self, semantic: Tensor, acoustic: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [groups, rows], and entries and inputs of each codebook [groups, rows, dim]."""
        norms = self.books.square().sum(-1)
        codes: list[Tensor] = []
        entries: list[Tensor] = []
        inputs = [semantic]
        residual = acoustic
        for k, book in enumerate(self.books):
            x = semantic if k == 0 else residual
            codes.append(torch.addmm(norms[k], x, book.t(), alpha=-2).argmin(-1))
            entries.append(book[codes[-1]])
            if k:
                inputs.append(residual)
                residual = residual - entries[-1]
        return torch.stack(codes), torch.stack(entries), torch.stack(inputs)

    @torch.no_grad()
    def initialise(self, semantic: Tensor, acoustic: Tensor) -> None:
        """Initialises every codebook with vectors of a trained encoder, so that all are in use."""
        codes = self.books.shape[1]
        residual = acoustic
        for k in range(len(self.books)):
            x = semantic if k == 0 else residual
            self.books[k] = x[torch.randint(len(x), (codes,), device=x.device)]
            if k:
                residual = residual - self.books[k][torch.cdist(residual, self.books[k]).argmin(-1)]
        self._sums.copy_(self.books)
        self._usage.fill_(1.0)

    def __call__(self, semantic: Tensor, acoustic: Tensor, active: Tensor) -> Quantized:
        """Quantises and updates the codebooks.

        Args:
            semantic: [rows, dim].
            acoustic: [rows, dim].
            active: [groups, rows], 1 where a row uses a codebook, else 0; codebook 0 always.
        """
        with torch.no_grad():
            codes, entries, inputs = self._chain(semantic.detach(), acoustic.detach())
            chosen = F.one_hot(codes, self.books.shape[1]).float() * active[..., None]
            self._usage.lerp_(chosen.sum(1), 0.02)
            self._sums.lerp_(chosen.mT @ inputs, 0.02)
            self.books.copy_(self._sums / self._usage.clamp(min=1e-5)[..., None])
            self._last_inputs, self._num_inputs = inputs, active.sum(1)
            added = entries[1:].cumsum(0)
            last = (entries[1:] * active[1:, :, None]).sum(0)
            any_rest = active[1:].amax(0)[:, None]
        off = (semantic - entries[0]).square().mean()
        each = (acoustic - added).square().mean(-1) * active[1:]
        return Quantized(
            semantic + (entries[0] - semantic).detach(),
            (acoustic + (last - acoustic).detach()) * any_rest,
            off + each.mean(1).sum(),
        )

    @torch.no_grad()
    def reset_unused(self) -> None:
        """Replaces unused entries by random vectors of the last batch."""
        groups, codes, dim = self.books.shape
        unused = self._usage < 0.03 * self._num_inputs[:, None] / codes
        rows = torch.randint(
            self._last_inputs.shape[1], (groups, codes, 1), device=self.books.device
        )
        drawn = self._last_inputs.gather(1, rows.expand(-1, -1, dim))
        self._usage.masked_fill_(unused, 1.0)
        self._sums.copy_(torch.where(unused[..., None], drawn, self._sums))
        self.books.copy_(self._sums / self._usage.clamp(min=1e-5)[..., None])

    def perplexity(self) -> Tensor:
        """Effective number of entries in use, of each codebook."""
        share = self._usage / self._usage.sum(1, keepdim=True)
        return (-(share * (share + 1e-9).log()).sum(1)).exp()


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Applies a pointwise convolution without bias, weight [out, in, 1], to the last axis."""
    return F.linear(x, weight[:, :, 0])


def unit_gain(weight: Tensor, x: Tensor) -> None:
    """Scales a projection to unit standard deviation of its output."""
    with torch.no_grad():
        weight.div_(project(x, weight).std() + 1e-8)


def uniform_(tensor: Tensor, inputs: int) -> None:
    """Initialises weights as torch initialises its layers."""
    bound = 1 / math.sqrt(inputs)
    torch.nn.init.uniform_(tensor, -bound, bound)
