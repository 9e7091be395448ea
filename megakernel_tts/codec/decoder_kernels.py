"""The codec's decoder as a sequence of CUDA kernels: buffers, weights and launches.

`DecoderKernels.decode` computes the function of `decoder.Decoder` for frames of several streams
side by side. csrc/codec/params.cuh describes the kernels' parameters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megakernel_tts.codec import weight_packing as packing
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.decoder import State, codebook_tables, fold_snake, history_length
from megakernel_tts.model.config import CodecConfig
from megakernel_tts.model.layers import merge_heads

ATTENTION_WINDOW = 72  # frames; kAttentionWindow
MAX_FRAMES = 8  # of one stream in a call
_NUM_CODEBOOKS = 16
FRAME = np.dtype(  # Frame in csrc/codec/params.cuh
    [
        ("pending_address", np.uint64),
        ("slot", np.int32),
        ("first_frame", np.int32),
        ("position", np.int32),
        ("codes", np.int32, _NUM_CODEBOOKS),
    ],
    align=True,
)
_HEAD_DIMS = (16, 32, 64)  # compiled
_MAX_LATENT = 1024  # channels of the depthwise kernel
_NORM_EPS = 1e-6  # of the layer norms; not in the configuration
_TWO_PLANES = 2  # the second plane holds the rounding errors of the first


class _Epilogue(IntEnum):
    """Epilogue in csrc/codec/params.cuh."""

    LINEAR = 0
    SNAKE = 1
    GELU = 2
    SILU_GATE = 3
    ROPE_QKV = 4
    SAMPLES = 5


@dataclass(frozen=True)
class _Activations:
    """Activations and the place of their history.

    Attributes:
        data: float16 [rows, planes, channels].
        rows_per_frame: Rows of one frame.
        history_rows: Rows before the call's first that the next layer reads.
        offset: Of the history in a slot, in elements.
    """

    data: Tensor
    rows_per_frame: int
    history_rows: int = 0
    offset: int = 0

    @property
    def planes(self) -> int:
        return self.data.shape[1]

    @property
    def channels(self) -> int:
        return self.data.shape[2]


class DecoderKernels:
    """Packed weights, buffers and the state of every slot.

    Attributes:
        requests: FRAME [capacity], on the host: the frames of a call.
        num_kept_frames: int32 [capacity], on the host: in the row of a stream's first frame, how
            many of its frames `update_state` keeps.
        pcm: int16 [capacity * samples per frame], on the host.
        non_finite: int32 [capacity], on the host: 1 where a frame's samples were not finite.
        history: float16 [slots, values]: the history of every layer.
        kv_cache: float32 [slots, layers, 2, ring, heads * head_dim]: keys and values.
        ring_size: Frames of the KV cache.
        stages: The part of the network that each kernel of `decode` belongs to.
    """

    def __init__(
        self, weights: w.Decoder, config: CodecConfig, *, slots: int, capacity: int, ops: Any
    ) -> None:
        """Packs the weights and allocates the buffers.

        Args:
            weights: float32 tensors on their device.
            config: The codec's configuration.
            slots: Number of streams whose state is kept.
            capacity: Largest number of frames of a call, over all streams.
            ops: The kernels' operators.

        Raises:
            ValueError: The kernels are not compiled for these shapes.
        """
        _check_shapes(config)
        self._ops, self._capacity = ops, capacity
        self._device = weights.input.device
        self._none = torch.empty(0, device=self._device)
        codec, stack = config.decoder, config.decoder.stack
        self._config, self._stack = config, stack
        self.stages: list[str] = []
        self._stage = ""
        self._launches: list[Callable[[int], None]] = []
        self._with_history: list[_Activations] = []
        self._history_size = 0  # elements of a slot
        self._qkv_width = stack.num_heads * stack.head_dim
        self.ring_size = ATTENTION_WINDOW - 1 + MAX_FRAMES
        requests = self._host_buffer(capacity * FRAME.itemsize // 4, torch.int32)
        self._requests = requests.view(capacity, -1)
        self.requests = self._requests.numpy().view(FRAME)[:, 0]
        self._frames = torch.zeros_like(self._requests, device=self._device)
        self.num_kept_frames = self._host_buffer(capacity, torch.int32)
        self.pcm = self._host_buffer(capacity * config.samples_per_frame, torch.int16)
        self.non_finite = self._host_buffer(capacity, torch.int32)
        self.kv_cache = self._floats(slots, stack.num_layers, 2, self.ring_size, self._qkv_width)
        self._rope = self._floats(capacity, stack.head_dim // 2, 2)
        self._queries = self._floats(capacity, self._qkv_width)
        x = self._build_frame_rate_layers(weights)
        rows_per_frame = math.prod(codec.upsampling_ratios)
        snakes = [fold_snake(block.snake) for block in weights.blocks[1:]]
        snakes.append(fold_snake(weights.snake))
        # A block's output is the input of a transposed convolution or of the last convolution.
        history_rows = [1] * (len(snakes) - 1) + [history_length(weights.conv_out)]
        for block, next_snake, rows in zip(weights.blocks, snakes, history_rows, strict=True):
            rows_per_frame *= block.transposed.stride
            x = self._build_block(x, block, next_snake, rows_per_frame, rows)
        self._stage = "convolution out"
        self._project(x, packing.sample(weights.conv_out), epilogue=_Epilogue.SAMPLES)
        self.history = torch.zeros(
            slots, self._history_size, dtype=torch.float16, device=self._device
        )

    def decode(self, num_frames: int) -> None:
        """Decodes the first `num_frames` requests into `pcm`, on the current stream."""
        for launch in self._launches:
            launch(num_frames)

    def update_state(self, num_frames: int) -> None:
        """After `decode`: moves the last kept rows of every layer into the histories."""
        numbers = [num_frames]
        tensors = [self._frames, self.num_kept_frames]
        for layer in self._with_history:
            tensors += [layer.data, self._history_of(layer)]
            numbers += self._numbers(layer)
        self._ops.codec_update_state(tensors, numbers)

    def pack_state(self, state: State) -> tuple[Tensor, Tensor]:
        """Converts the state of one stream in plain torch to a slot's `history` and `kv_cache`."""
        histories = [
            _split_planes(packing.pad_last(columns[0].t()), layer.planes)
            for layer, columns in zip(self._with_history, state.columns, strict=True)
        ]
        kv_cache = torch.zeros_like(self.kv_cache[0])
        positions = torch.arange(1 - ATTENTION_WINDOW, 0, device=self._device) + state.position
        entries = positions % self.ring_size
        kv_cache[:, 0, entries] = merge_heads(packing.interleave_rope_pairs(state.keys[:, 0]))
        kv_cache[:, 1, entries] = merge_heads(state.values[:, 0])
        return torch.cat([history.flatten() for history in histories]), kv_cache

    def _host_buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the kernels read and write."""
        return torch.zeros(size, dtype=dtype, pin_memory=self._device.type == "cuda")

    def _floats(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self._device)

    def _activations(
        self, rows_per_frame: int, channels: int, planes: int, history_rows: int = 0
    ) -> _Activations:
        shape = (self._capacity * rows_per_frame, planes, channels)
        data = torch.zeros(shape, dtype=torch.float16, device=self._device)
        activations = _Activations(data, rows_per_frame, history_rows, self._history_size)
        if history_rows:
            self._with_history.append(activations)
            self._history_size += history_rows * planes * channels
        return activations

    def _append(self, launch: Callable[[int], None]) -> None:
        self._launches.append(launch)
        self.stages.append(self._stage)

    def _history_of(self, x: _Activations) -> Tensor:
        return self.history[:, x.offset :] if x.history_rows else self._none

    def _numbers(self, x: _Activations) -> list[int]:
        return [x.planes, x.channels, x.history_rows, x.rows_per_frame, self._history_size]

    def _build_frame_rate_layers(self, weights: w.Decoder) -> _Activations:
        """From the codes to the input of the first block; few rows, so all have two planes."""
        codec = self._config.decoder
        embedded = self._activations(
            1, codec.codebook_dim, _TWO_PLANES, history_length(weights.pre_conv)
        )
        self._stage = "codes"
        self._embed(weights, embedded)
        latent = self._activations(1, codec.latent_dim, _TWO_PLANES)
        self._project(embedded, packing.convolution(weights.pre_conv), latent)
        x = self._build_transformer(weights, latent)
        rows_per_frame = 1
        for i, upsample in enumerate(weights.upsample):
            rows_per_frame *= upsample.transposed.stride
            is_last = i + 1 == len(weights.upsample)
            history_rows = history_length(weights.conv_in) if is_last else 0
            x = self._build_upsample(x, upsample, rows_per_frame, history_rows)
        self._stage = "convolution in"
        block_input = self._activations(
            rows_per_frame, packing.padded(codec.decoder_dim), _TWO_PLANES, 1
        )
        snake = fold_snake(weights.blocks[0].snake)
        conv_in = packing.convolution(weights.conv_in, snake)
        self._project(x, conv_in, block_input, epilogue=_Epilogue.SNAKE)
        return block_input

    def _build_transformer(self, weights: w.Decoder, latent: _Activations) -> _Activations:
        stack, width = self._stack, self._qkv_width
        self._stage = "transformer"
        residual = self._floats(self._capacity, stack.hidden_size)
        hidden = self._activations(1, stack.hidden_size, _TWO_PLANES)
        attended = self._activations(1, width, _TWO_PLANES)
        mlp_hidden = self._activations(1, stack.intermediate_size, _TWO_PLANES)
        into = packing.linear(weights.input, weights.input_bias)
        self._project(latent, into, hidden, residual_out=residual)
        for i, layer in enumerate(weights.layers):
            qk = [packing.interleave_rope_rows(m, stack.head_dim) for m in (layer.q, layer.k)]
            scale = torch.ones(3 * width, device=self._device)
            scale[:width] /= math.sqrt(stack.head_dim)
            qkv = packing.linear(torch.cat([*qk, layer.v]), None, scale, layer.input_norm)
            self._project(hidden, qkv, norm=True, epilogue=_Epilogue.ROPE_QKV, layer=i)
            self._attend(i, attended)
            out = packing.linear(layer.o, None, layer.scale)
            self._project(attended, out, hidden, residual=residual, residual_out=residual)
            pairs = torch.stack([layer.gate, layer.up], dim=1).flatten(0, 1)
            gate_up = packing.linear(pairs, norm=layer.post_norm)
            self._project(hidden, gate_up, mlp_hidden, norm=True, epilogue=_Epilogue.SILU_GATE)
            down = packing.linear(layer.down, None, layer.mlp_scale)
            self._project(mlp_hidden, down, hidden, residual=residual, residual_out=residual)
        output = packing.linear(weights.output, weights.output_bias, norm=weights.norm)
        self._project(hidden, output, latent, norm=True)
        return latent

    def _build_upsample(
        self, x: _Activations, upsample: w.Upsample, rows_per_frame: int, history_rows: int
    ) -> _Activations:
        """A transposed convolution and a ConvNeXt block; `history_rows` are of the output."""
        self._stage = f"upsampling to {rows_per_frame} rows"
        convnext, latent = upsample.convnext, self._config.decoder.latent_dim
        residual = self._floats(self._capacity * rows_per_frame, latent)
        conv_input = self._activations(
            rows_per_frame, latent, _TWO_PLANES, history_length(convnext.depthwise)
        )
        normed = self._activations(rows_per_frame, latent, _TWO_PLANES)
        mlp_hidden = self._activations(rows_per_frame, 4 * latent, _TWO_PLANES)
        output = self._activations(rows_per_frame, latent, _TWO_PLANES, history_rows)
        transposed = packing.transposed(upsample.transposed)
        self._project(x, transposed, conv_input, residual_out=residual)
        self._depthwise(conv_input, convnext, normed)
        up = packing.linear(convnext.up, convnext.up_bias)
        self._project(normed, up, mlp_hidden, epilogue=_Epilogue.GELU)
        down = packing.linear(convnext.down, convnext.down_bias, convnext.gamma)
        self._project(mlp_hidden, down, output, residual=residual)
        return output

    def _build_block(
        self,
        x: _Activations,
        block: w.Block,
        next_snake: w.Snake,
        rows_per_frame: int,
        history_rows: int,
    ) -> _Activations:
        """A transposed convolution and its residual units.

        Args:
            x: The input, behind the block's first snake.
            block: The weights.
            next_snake: The snake after the block, applied to the output.
            rows_per_frame: Of the output.
            history_rows: Of the output.
        """
        self._stage = f"block of {rows_per_frame} rows"
        channels = packing.padded(block.transposed.weight.shape[1])
        residual = self._floats(self._capacity * rows_per_frame, channels)
        units = block.residuals
        inputs = [
            self._activations(rows_per_frame, channels, 1, history_length(unit.conv1))
            for unit in units
        ]
        middle = self._activations(rows_per_frame, channels, 1)
        output = self._activations(rows_per_frame, channels, _TWO_PLANES, history_rows)
        snakes = [*(fold_snake(unit.snake1) for unit in units), next_snake]
        transposed = packing.transposed(block.transposed, snakes[0])
        self._project(x, transposed, inputs[0], residual_out=residual, epilogue=_Epilogue.SNAKE)
        outputs = [*inputs[1:], output]
        for unit, unit_input, unit_output, snake in zip(
            units, inputs, outputs, snakes[1:], strict=True
        ):
            conv1 = packing.convolution(unit.conv1, fold_snake(unit.snake2))
            self._project(unit_input, conv1, middle, epilogue=_Epilogue.SNAKE)
            conv2 = packing.convolution(unit.conv2, snake)
            self._project(
                middle,
                conv2,
                unit_output,
                residual=residual,
                residual_out=residual,
                epilogue=_Epilogue.SNAKE,
            )
        return output

    def _embed(self, weights: w.Decoder, output: _Activations) -> None:
        stack = self._stack
        codebooks = codebook_tables(weights).contiguous()
        exponents = torch.arange(0, stack.head_dim, 2, device=self._device).float()
        frequencies = 1.0 / stack.rope_theta ** (exponents / stack.head_dim)
        tensors = [
            self._frames, self._requests, codebooks, frequencies, self._rope, output.data,
        ]  # fmt: skip
        numbers = [codebooks.shape[1], stack.head_dim // 2]

        def launch(num_frames: int) -> None:
            self._ops.codec_embed(tensors, [num_frames, *numbers, *self._numbers(output)])

        self._append(launch)

    def _attend(self, layer: int, output: _Activations) -> None:
        stack = self._stack
        tensors = [self._frames, self._queries, self.kv_cache[:, layer], output.data]
        numbers = [stack.num_heads, stack.head_dim, self.kv_cache.stride(0), self.ring_size]

        def launch(num_frames: int) -> None:
            self._ops.codec_attend(tensors, [num_frames, *numbers, *self._numbers(output)])

        self._append(launch)

    def _depthwise(self, x: _Activations, convnext: w.ConvNext, output: _Activations) -> None:
        assert convnext.depthwise.bias is not None
        weight = convnext.depthwise.weight[:, 0].t().contiguous()  # [taps, channels]
        bias = convnext.depthwise.bias.clone()  # its own allocation: aligned to 16 bytes
        norm = torch.stack([convnext.norm.weight, convnext.norm.bias])

        def launch(num_frames: int) -> None:
            tensors = [self._frames, x.data, self._history_of(x), weight, bias, norm, output.data]
            numbers = [num_frames * x.rows_per_frame, *self._numbers(x), *self._numbers(output)]
            self._ops.codec_depthwise(tensors, numbers, _NORM_EPS)

        self._append(launch)

    def _project(
        self,
        x: _Activations,
        packed: packing.Packed,
        output: _Activations | None = None,
        *,
        residual: Tensor | None = None,
        residual_out: Tensor | None = None,
        norm: bool = False,
        epilogue: _Epilogue = _Epilogue.LINEAR,
        layer: int = 0,
    ) -> None:
        """Appends a convolution or linear layer; see ProjectionParams in csrc/codec/params.cuh.

        Args:
            x: The input.
            packed: The weights.
            output: Receives the output, unless the epilogue writes elsewhere.
            residual: float32 [rows, columns], added before the epilogue.
            residual_out: float32 [rows, columns], the sum before the epilogue; may be `residual`.
            norm: Whether the input is divided by its root mean square.
            epilogue: The function applied to the sums.
            layer: Transformer layer whose KV cache is written (`ROPE_QKV`).
        """
        assert packed.channels == x.channels
        none = self._none
        out = _Activations(none.view(0, 1, 1), 1) if output is None else output
        optional = [none if t is None else t for t in (residual, residual_out)]
        kv_cache = self.kv_cache[:, layer]
        overlaps_previous = len(self._launches) > 1  # the first kernel writes the frames

        def launch(num_frames: int) -> None:
            tensors = [self._frames, x.data, self._history_of(x), packed.weights, packed.columns]
            tensors += [*optional, out.data, self._rope, self._queries, kv_cache]
            tensors += [self.pcm, self.non_finite]
            numbers = [num_frames * x.rows_per_frame, packed.taps, packed.dilation]
            numbers += [packed.num_columns, self._stack.hidden_size if norm else 0, epilogue]
            numbers += [self.kv_cache.stride(0), self.ring_size, self._stack.head_dim]
            numbers += [overlaps_previous, *self._numbers(x), *self._numbers(out)]
            self._ops.codec_project(tensors, numbers, self._stack.norm_eps)

        self._append(launch)


def _split_planes(rows: Tensor, planes: int) -> Tensor:
    """float32 [rows, channels] -> float16 [rows, planes, channels]."""
    largest = torch.finfo(torch.float16).max
    rounded = rows.clamp(-largest, largest).half()
    error = (rows - rounded.float()).clamp(-largest, largest).half()
    return torch.stack([rounded, error][:planes], dim=1)


def _check_shapes(config: CodecConfig) -> None:
    """Refuses shapes that the kernels are not compiled for."""
    codec, stack = config.decoder, config.decoder.stack
    for name, found, wanted in (
        ("sliding_window", codec.sliding_window, (ATTENTION_WINDOW,)),
        ("num_quantizers", codec.num_groups, (_NUM_CODEBOOKS,)),
        ("head_dim", stack.head_dim, _HEAD_DIMS),
        ("num_key_value_heads", stack.num_kv_heads, (stack.num_heads,)),
    ):
        if found not in wanted:
            raise ValueError(
                f"The codec's kernels are compiled for {name} in {wanted}, found {found}; use the "
                "decoder in plain torch."
            )
    sizes = (
        codec.latent_dim,
        codec.codebook_dim,
        stack.hidden_size,
        stack.intermediate_size,
        stack.num_heads * stack.head_dim,
    )
    if any(size % packing.STEP for size in sizes) or codec.latent_dim > _MAX_LATENT:
        raise ValueError(
            f"The codec's kernels take multiples of {packing.STEP} channels and a latent_dim of at "
            f"most {_MAX_LATENT:,}, found {sizes}; use the decoder in plain torch."
        )
