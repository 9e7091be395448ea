"""The decoder as a sequence of CUDA kernels: what each reads, and where it writes.

`Network.decode` is what `decoder.Decoder` computes, frame after frame of any number of streams side
by side. See csrc/codec/params.cuh for what a kernel is given.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megakernel_tts.codec import weight_packing as packing
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.decoder import State, codebook_tables, fold_snake
from megakernel_tts.model.config import CodecConfig
from megakernel_tts.model.layers import merge_heads

WINDOW = 72  # frames that attention sees; csrc/codec/params.cuh
MOST_FRAMES = 8  # of a stream in a call
_GROUPS = 16
FRAME = np.dtype(  # csrc/codec/params.cuh
    [
        ("coming", np.uint64),
        ("slot", np.int32),
        ("first", np.int32),
        ("position", np.int32),
        ("codes", np.int32, _GROUPS),
    ],
    align=True,
)
_HEADS = (16, 32, 64)  # channels of a head that are compiled
_PLAIN, _SNAKE, _GELU, _GATE, _TURN, _WAVE = range(6)  # what follows a product
_BOTH = 2  # planes: what the first rounds off is in the second


@dataclass(frozen=True)
class _Rows:
    """Activations float16 [rows, planes, channels], and where the rows before them are kept."""

    now: Tensor
    rate: int  # rows a frame
    depth: int = 0
    offset: int = 0  # of its history in a slot

    @property
    def planes(self) -> int:
        return self.now.shape[1]

    @property
    def channels(self) -> int:
        return self.now.shape[2]


class Network:
    """Weights, buffers and the state of every slot.

    Attributes:
        asked: FRAME [capacity], on the host: who speaks in a call.
        kept: int32 [capacity], on the host: in the row of a stream's first frame, how many of its
            frames `remember` counts.
        pcm: int16 [capacity * samples a frame], on the host.
        broken: int32 [capacity], on the host: a frame's samples were not finite.
        history: float16 [slots, values]: of every convolution, the rows before the next.
        memory: float32 [slots, layers, 2, ring, channels]: keys and values.
        stages: What each kernel of `decode` is part of.
    """

    def __init__(
        self, weights: w.Decoder, config: CodecConfig, *, slots: int, capacity: int, ops: Any
    ) -> None:
        """Packs the weights and allocates the buffers.

        Args:
            weights: float32 tensors on their device.
            config: The codec's numbers.
            slots: Streams whose state is kept.
            capacity: The most frames of a call, of all streams together.
            ops: The kernels.

        Raises:
            ValueError: The kernels are not compiled for these shapes.
        """
        self._ops, self._capacity = ops, capacity
        self._device = weights.input.device
        self._none = torch.empty(0, device=self._device)
        _check(config)
        d, s = config.decoder, config.decoder.stack
        self._config, self._stack = config, s
        self.stages: list[str] = []
        self._layers: list[Callable[[int], None]] = []
        self._remembered: list[_Rows] = []
        self._size = 0  # of a slot's history
        self._wide = s.num_heads * s.head_dim
        self.ring = WINDOW - 1 + MOST_FRAMES
        asked = self._mail(capacity * FRAME.itemsize // 4, torch.int32).view(capacity, -1)
        self.asked = asked.numpy().view(FRAME)[:, 0]
        self._asked, self._frames = asked, torch.zeros_like(asked, device=self._device)
        self.kept = self._mail(capacity, torch.int32)
        self.pcm = self._mail(capacity * config.samples_per_frame, torch.int16)
        self.broken = self._mail(capacity, torch.int32)
        self.memory = self._floats(slots, s.num_layers, 2, self.ring, self._wide)
        self._turns = self._floats(capacity, s.head_dim // 2, 2)
        self._queries = self._floats(capacity, self._wide)
        rows = self._front(weights)
        rate = math.prod(d.upsampling_ratios)
        snakes = [fold_snake(block.snake) for block in weights.blocks[1:]]
        snakes.append(fold_snake(weights.snake))
        depths = [1] * (len(snakes) - 1) + [_depth(weights.conv_out)]  # of what comes after
        for block, after, depth in zip(weights.blocks, snakes, depths, strict=True):
            rate *= block.transposed.stride
            rows = self._block(rows, block, after, rate, depth)
        self._stage = "convolution out"
        self._product(rows, packing.sample(weights.conv_out), finish=_WAVE)
        self.history = torch.zeros(slots, self._size, dtype=torch.float16, device=self._device)

    def decode(self, count: int) -> None:
        """Decodes the first `count` of `asked` into `pcm`, on the current stream."""
        for layer in self._layers:
            layer(count)

    def remember(self, count: int) -> None:
        """After `decode`: every layer's last rows that count become their streams' history."""
        numbers = [count]
        tensors = [self._frames, self.kept]
        for rows in self._remembered:
            tensors += [rows.now, self._past(rows)]
            numbers += self._numbers(rows)
        self._ops.codec_remember(tensors, numbers)

    def adopt(self, state: State) -> tuple[Tensor, Tensor]:
        """What plain torch carries for one stream, as a slot's `history` and `memory`."""
        parts = [
            _in_planes(packing.pad_last(columns[0].t()), rows.planes)
            for rows, columns in zip(self._remembered, state.columns, strict=True)
        ]
        memory = torch.zeros_like(self.memory[0])
        past = torch.arange(1 - WINDOW, 0, device=self._device) + state.position
        places = past % self.ring
        memory[:, 0, places] = merge_heads(packing.turned_last(state.keys[:, 0]))
        memory[:, 1, places] = merge_heads(state.values[:, 0])
        return torch.cat([part.flatten() for part in parts]), memory

    def _mail(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the kernels write."""
        return torch.zeros(size, dtype=dtype, pin_memory=self._device.type == "cuda")

    def _floats(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self._device)

    def _rows(self, rate: int, channels: int, planes: int, depth: int = 0) -> _Rows:
        """Allocates rows, with a history if any are remembered."""
        shape = (self._capacity * rate, planes, channels)
        now = torch.zeros(shape, dtype=torch.float16, device=self._device)
        rows = _Rows(now, rate, depth, self._size)
        if depth:
            self._remembered.append(rows)
            self._size += depth * planes * channels
        return rows

    def _append(self, launch: Callable[[int], None]) -> None:
        self._layers.append(launch)
        self.stages.append(self._stage)

    def _past(self, rows: _Rows) -> Tensor:
        return self.history[:, rows.offset :] if rows.depth else self._none

    def _numbers(self, rows: _Rows) -> list[int]:
        return [rows.planes, rows.channels, rows.depth, rows.rate, self._size]

    def _front(self, weights: w.Decoder) -> _Rows:
        """Codes to the input of the first block: the few rows, all in both planes."""
        d = self._config.decoder
        embedded = self._rows(1, d.codebook_dim, _BOTH, _depth(weights.pre_conv))
        self._stage = "codes"
        self._embed(weights, embedded)
        latent = self._rows(1, d.latent_dim, _BOTH)
        self._product(embedded, packing.convolution(weights.pre_conv), latent)
        rows = self._transformer(weights, latent)
        rate = 1
        for i, up in enumerate(weights.upsample):
            rate *= up.transposed.stride
            last = i + 1 == len(weights.upsample)
            depth = _depth(weights.conv_in) if last else 0
            rows = self._upsample(rows, up, rate, depth)
        self._stage = "convolution in"
        into = self._rows(rate, packing.padded(d.decoder_dim), _BOTH, 1)
        snake = fold_snake(weights.blocks[0].snake)
        self._product(rows, packing.convolution(weights.conv_in, snake), into, finish=_SNAKE)
        return into

    def _transformer(self, weights: w.Decoder, latent: _Rows) -> _Rows:
        s = self._stack
        self._stage = "transformer"
        x = self._floats(self._capacity, s.hidden_size)
        a, b = self._rows(1, s.hidden_size, _BOTH), self._rows(1, self._wide, _BOTH)
        c = self._rows(1, s.intermediate_size, _BOTH)
        self._product(latent, packing.linear(weights.input, weights.input_bias), a, sums=x)
        for i, layer in enumerate(weights.layers):
            qk = [packing.turned(m, s.head_dim) for m in (layer.q, layer.k)]
            scale = torch.ones(3 * self._wide, device=self._device)
            scale[: self._wide] /= math.sqrt(s.head_dim)
            qkv = packing.linear(torch.cat([*qk, layer.v]), None, scale, layer.input_norm)
            self._product(a, qkv, norm=True, finish=_TURN, layer=i)
            self._attend(i, b)
            out = packing.linear(layer.o, None, layer.scale)
            self._product(b, out, a, residual=x, sums=x)
            pairs = torch.stack([layer.gate, layer.up], dim=1).flatten(0, 1)
            gate_up = packing.linear(pairs, norm=layer.post_norm)
            self._product(a, gate_up, c, norm=True, finish=_GATE)
            down = packing.linear(layer.down, None, layer.mlp_scale)
            self._product(c, down, a, residual=x, sums=x)
        last = packing.linear(weights.output, weights.output_bias, norm=weights.norm)
        self._product(a, last, latent, norm=True)
        return latent

    def _upsample(self, rows: _Rows, up: w.Upsample, rate: int, depth: int) -> _Rows:
        """Returns its output, of which `depth` rows are remembered."""
        self._stage = f"upsampling to {rate} rows"
        block, latent = up.convnext, self._config.decoder.latent_dim
        x = self._floats(self._capacity * rate, latent)
        a = self._rows(rate, latent, _BOTH, _depth(block.depthwise))
        b, c = self._rows(rate, latent, _BOTH), self._rows(rate, 4 * latent, _BOTH)
        out = self._rows(rate, latent, _BOTH, depth)
        self._product(rows, packing.transposed(up.transposed), a, sums=x)
        self._depthwise(a, block, b)
        self._product(b, packing.linear(block.up, block.up_bias), c, finish=_GELU)
        down = packing.linear(block.down, block.down_bias, block.gamma)
        self._product(c, down, out, residual=x)
        return out

    def _block(self, rows: _Rows, block: w.Block, after: w.Snake, rate: int, depth: int) -> _Rows:
        """Returns its output behind the snake `after`, of which `depth` rows are remembered."""
        self._stage = f"block of {rate} rows"
        channels = packing.padded(block.transposed.weight.shape[1])
        x = self._floats(self._capacity * rate, channels)
        units = block.residuals
        inputs = [self._rows(rate, channels, 1, _depth(unit.conv1)) for unit in units]
        middle = self._rows(rate, channels, 1)
        out = self._rows(rate, channels, _BOTH, depth)
        snakes = [*(fold_snake(unit.snake1) for unit in units), after]
        self._product(
            rows, packing.transposed(block.transposed, snakes[0]), inputs[0], sums=x, finish=_SNAKE
        )
        for unit, into, to, snake in zip(
            units, inputs, [*inputs[1:], out], snakes[1:], strict=True
        ):
            first = packing.convolution(unit.conv1, fold_snake(unit.snake2))
            self._product(into, first, middle, finish=_SNAKE)
            second = packing.convolution(unit.conv2, snake)
            self._product(middle, second, to, residual=x, sums=x, finish=_SNAKE)
        return out

    def _embed(self, weights: w.Decoder, out: _Rows) -> None:
        s = self._stack
        tables = codebook_tables(weights).contiguous()
        exponents = torch.arange(0, s.head_dim, 2, device=self._device).float() / s.head_dim
        angles = 1.0 / s.rope_theta**exponents
        tensors = [self._frames, self._asked, tables, angles, self._turns, out.now]
        numbers = [tables.shape[1], s.head_dim // 2]

        def launch(count: int) -> None:
            self._ops.codec_embed(tensors, [count, *numbers, *self._numbers(out)])

        self._append(launch)

    def _attend(self, layer: int, out: _Rows) -> None:
        s = self._stack
        tensors = [self._frames, self._queries, self.memory[:, layer], out.now]
        numbers = [s.num_heads, s.head_dim, self.memory.stride(0), self.ring]

        def launch(count: int) -> None:
            self._ops.codec_attend(tensors, [count, *numbers, *self._numbers(out)])

        self._append(launch)

    def _depthwise(self, rows: _Rows, block: w.ConvNext, out: _Rows) -> None:
        assert block.depthwise.bias is not None
        weight = block.depthwise.weight[:, 0].t().contiguous()  # [taps, channels]
        bias = block.depthwise.bias.clone()  # on its own, so that it begins on 16 bytes
        norm = torch.stack([block.norm.weight, block.norm.bias])

        def launch(count: int) -> None:
            tensors = [self._frames, rows.now, self._past(rows), weight, bias]
            numbers = [count * rows.rate, *self._numbers(rows), *self._numbers(out)]
            self._ops.codec_depthwise([*tensors, norm, out.now], numbers, 1e-6)

        self._append(launch)

    def _product(
        self,
        rows: _Rows,
        packed: packing.Packed,
        out: _Rows | None = None,
        *,
        residual: Tensor | None = None,
        sums: Tensor | None = None,
        norm: bool = False,
        finish: int = _PLAIN,
        layer: int = 0,
    ) -> None:
        """Rows times weights; see `Product` in csrc/codec/params.cuh.

        Args:
            rows: The input.
            packed: The weights.
            out: What follows, if it is rows.
            residual: float32 [rows, columns] that is added.
            sums: float32 [rows, columns] as the next residual; may be the same.
            norm: Whether the input is normed: root-mean-square, without a scale.
            finish: What follows.
            layer: Whose keys and values these are, if they are.
        """
        none = self._none
        to = _Rows(none.view(0, 1, 1), 1) if out is None else out
        given = [none if t is None else t for t in (residual, sums)]
        memory = self.memory[:, layer]
        early = len(self._layers) > 1  # the frames are there once the first kernel is over

        def launch(count: int) -> None:
            tensors = [self._frames, rows.now, self._past(rows), packed.weights, packed.column]
            tensors += [*given, to.now, self._turns, self._queries, memory]
            numbers = [count * rows.rate, packed.taps, packed.dilation, packed.columns]
            numbers += [self._stack.hidden_size if norm else 0, finish, self.memory.stride(0)]
            numbers += [self.ring, self._stack.head_dim, early]
            numbers += [*self._numbers(rows), *self._numbers(to)]
            mail = [self.pcm, self.broken]
            self._ops.codec_product([*tensors, *mail], numbers, self._stack.norm_eps)

        assert packed.channels == rows.channels
        self._append(launch)


def _in_planes(rows: Tensor, planes: int) -> Tensor:
    """float32 [rows, channels] -> float16 [rows, planes, channels]."""
    most = torch.finfo(torch.float16).max
    coarse = rows.clamp(-most, most).half()
    return torch.stack([coarse, (rows - coarse.float()).clamp(-most, most).half()][:planes], dim=1)


def _depth(conv: w.Conv) -> int:
    return (conv.weight.shape[-1] - 1) * conv.dilation


def _check(config: CodecConfig) -> None:
    """The shapes that are compiled in."""
    d = config.decoder
    s = d.stack
    for name, found, wanted in (
        ("sliding_window", d.sliding_window, (WINDOW,)),
        ("num_quantizers", d.num_groups, (_GROUPS,)),
        ("head_dim", s.head_dim, _HEADS),
        ("num_key_value_heads", s.num_kv_heads, (s.num_heads,)),
    ):
        if found not in wanted:
            raise ValueError(
                f"The codec's kernels are compiled for {name} in {wanted}, found {found}; use the "
                "decoder in plain torch."
            )
    sizes = (
        d.latent_dim,
        d.codebook_dim,
        s.hidden_size,
        s.intermediate_size,
        s.num_heads * s.head_dim,
    )
    if any(size % packing.STEP for size in sizes) or d.latent_dim > 1024:
        raise ValueError(
            f"The codec's kernels take multiples of {packing.STEP} channels and a latent_dim of at "
            f"most 1,024, found {sizes}; use the decoder in plain torch."
        )
