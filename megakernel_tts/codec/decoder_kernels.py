"""The codec's decoder as a sequence of CUDA kernels.

`DecoderKernels.decode` computes the function of `decoder.Decoder` for frames of several streams
side by side. csrc/codec/params.cuh describes the kernels' parameters.
"""

import math

import torch
from torch import Tensor

from megakernel_common.layers import merge_heads
from megakernel_tts.codec import weight_packing as packing
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.activation_buffers import ActivationBuffer
from megakernel_tts.codec.convolutions import history_length
from megakernel_tts.codec.decoder import State, fold_snake
from megakernel_tts.codec.kernel_layers import KernelLayers
from megakernel_tts.kernels.codec import HEAD_DIMS, CodecKernels
from megakernel_tts.kernels.codec_structs import (
    ATTENTION_WINDOW,
    MAX_DEPTHWISE_CHANNELS,
    NUM_CODEBOOKS,
    SAMPLE_ROWS,
    STEP_CHANNELS,
    Epilogue,
)
from megakernel_tts.model.config import CodecConfig

# Planes of activations. The second one holds the rounding errors of the first, where these would
# add most noise (docs/design-notes/codec.md).
_ONE_PLANE, _TWO_PLANES = 1, 2


class DecoderKernels(KernelLayers):
    """The decoder's network as kernel launches."""

    def __init__(
        self,
        weights: w.DecoderWeights,
        config: CodecConfig,
        *,
        slots: int,
        capacity: int,
        kernels: CodecKernels,
    ) -> None:
        """Packs the weights and allocates the buffers.

        Args:
            weights: float32 tensors on their device.
            config: The codec's configuration.
            slots: Number of streams whose state is kept.
            capacity: Largest number of frames of a call, over all streams.
            kernels: The compiled kernels.

        Raises:
            ValueError: The kernels are not compiled for these shapes.
        """
        _check_shapes(config)
        super().__init__(
            config, weights.input.device, slots=slots, capacity=capacity, kernels=kernels
        )
        codec = self._codec = config.decoder
        x = self._build_frame_rate_layers(weights)
        rows_per_frame = math.prod(codec.upsampling_ratios)
        snakes = [fold_snake(block.snake) for block in weights.blocks[1:]]
        snakes.append(fold_snake(weights.snake))
        # A block's output is the input of a transposed convolution or of the last convolution.
        history_rows = [1] * (len(snakes) - 1) + [history_length(weights.conv_out)]
        for block, next_snake, rows in zip(weights.blocks, snakes, history_rows, strict=True):
            rows_per_frame *= block.transposed.stride
            x = self._build_block(x, block, next_snake, rows_per_frame, rows)
        self.stage = "convolution out"
        self.samples(x, weights.conv_out)
        self.finish()

    def pack_state(self, state: State) -> tuple[Tensor, Tensor]:
        """Converts the state of one stream in plain torch to a slot's `history` and `kv_cache`."""
        histories = [
            _split_planes(packing.pad_last(columns[0].t()), layer.planes)
            for layer, columns in zip(self.buffers.with_history, state.columns, strict=True)
        ]
        kv_cache = torch.zeros_like(self.kv_cache[0])
        positions = torch.arange(1 - ATTENTION_WINDOW, 0, device=self._device) + state.position
        entries = positions % self.ring_size
        keys = packing.interleave_rope_pairs(state.keys[:, 0])
        kv_cache[:, 0, entries] = _round(merge_heads(keys))
        kv_cache[:, 1, entries] = _round(merge_heads(state.values[:, 0]))
        return torch.cat([history.flatten() for history in histories]), kv_cache

    def _build_frame_rate_layers(self, weights: w.DecoderWeights) -> ActivationBuffer:
        """From the codes to the input of the first block."""
        codec = self._codec
        embedded = self.buffers.allocate(
            1, codec.codebook_dim, _TWO_PLANES, history_length(weights.pre_conv)
        )
        self.stage = "codes"
        self.embed(weights, embedded)
        latent = self.buffers.allocate(1, codec.latent_dim, _TWO_PLANES)
        self.project(embedded, packing.convolution(weights.pre_conv), latent)
        x = self._build_transformer(weights, latent)
        rows_per_frame = 1
        for i, upsample in enumerate(weights.upsample):
            rows_per_frame *= upsample.transposed.stride
            is_last = i + 1 == len(weights.upsample)
            history_rows = history_length(weights.conv_in) if is_last else 0
            planes = _TWO_PLANES if is_last else _ONE_PLANE
            x = self._build_upsample(x, upsample, rows_per_frame, history_rows, planes)
        self.stage = "convolution in"
        block_input = self.buffers.allocate(
            rows_per_frame, packing.padded(codec.decoder_dim), _ONE_PLANE, 1
        )
        snake = fold_snake(weights.blocks[0].snake)
        conv_in = packing.convolution(weights.conv_in, snake)
        self.project(x, conv_in, block_input, epilogue=Epilogue.SNAKE)
        return block_input

    def _build_transformer(
        self, weights: w.DecoderWeights, latent: ActivationBuffer
    ) -> ActivationBuffer:
        stack, width = self._stack, self._stack.num_heads * self._stack.head_dim
        self.stage = "transformer"
        residual = self.floats(self._capacity, stack.hidden_size)
        hidden = self.buffers.allocate(1, stack.hidden_size, _ONE_PLANE)
        last_hidden = self.buffers.allocate(1, stack.hidden_size, _TWO_PLANES)
        attended = self.buffers.allocate(1, width, _ONE_PLANE)
        mlp_hidden = self.buffers.allocate(1, stack.intermediate_size, _ONE_PLANE)
        into = packing.linear(weights.input, weights.input_bias)
        self.project(latent, into, hidden, residual_out=residual)
        for i, layer in enumerate(weights.layers):
            qk = [packing.interleave_rope_rows(m, stack.head_dim) for m in (layer.q, layer.k)]
            scale = torch.ones(3 * width, device=self._device)
            scale[:width] /= math.sqrt(stack.head_dim)
            qkv = packing.linear(torch.cat([*qk, layer.v]), None, scale, layer.input_norm)
            self.project(hidden, qkv, norm=True, epilogue=Epilogue.ROPE_QKV, layer=i)
            self.attend(i, attended)
            out = packing.linear(layer.o, None, layer.scale)
            self.project(attended, out, hidden, residual=residual, residual_out=residual)
            pairs = torch.stack([layer.gate, layer.up], dim=1).flatten(0, 1)
            gate_up = packing.linear(pairs, norm=layer.post_norm)
            self.project(hidden, gate_up, mlp_hidden, norm=True, epilogue=Epilogue.SILU_GATE)
            down = packing.linear(layer.down, None, layer.mlp_scale)
            output = last_hidden if layer is weights.layers[-1] else hidden
            self.project(mlp_hidden, down, output, residual=residual, residual_out=residual)
        out = packing.linear(weights.output, weights.output_bias, norm=weights.norm)
        self.project(last_hidden, out, latent, norm=True)
        return latent

    def _build_upsample(
        self,
        x: ActivationBuffer,
        upsample: w.Upsample,
        rows_per_frame: int,
        history_rows: int,
        planes: int,
    ) -> ActivationBuffer:
        """A transposed convolution and a ConvNeXt block.

        Args:
            x: The input.
            upsample: The weights.
            rows_per_frame: Of the output.
            history_rows: Of the output.
            planes: Of the output.
        """
        self.stage = f"upsampling to {rows_per_frame} rows"
        convnext, latent = upsample.convnext, self._codec.latent_dim
        residual = self.floats(self._capacity * rows_per_frame, latent)
        conv_input = self.buffers.allocate(
            rows_per_frame, latent, _TWO_PLANES, history_length(convnext.depthwise)
        )
        normed = self.buffers.allocate(rows_per_frame, latent, _ONE_PLANE)
        mlp_hidden = self.buffers.allocate(rows_per_frame, 4 * latent, _ONE_PLANE)
        output = self.buffers.allocate(rows_per_frame, latent, planes, history_rows)
        transposed = packing.transposed(upsample.transposed)
        self.project(x, transposed, conv_input, residual_out=residual)
        self.depthwise(conv_input, convnext, normed)
        up = packing.linear(convnext.up, convnext.up_bias)
        self.project(normed, up, mlp_hidden, epilogue=Epilogue.GELU)
        down = packing.linear(convnext.down, convnext.down_bias, convnext.gamma)
        self.project(mlp_hidden, down, output, residual=residual)
        return output

    def _build_block(
        self,
        x: ActivationBuffer,
        block: w.DecoderBlock,
        next_snake: w.Snake,
        rows_per_frame: int,
        history_rows: int,
    ) -> ActivationBuffer:
        """A transposed convolution and its residual units.

        Args:
            x: The input, behind the block's first snake.
            block: The weights.
            next_snake: The snake after the block, applied to the output.
            rows_per_frame: Of the output.
            history_rows: Of the output.
        """
        self.stage = f"block of {rows_per_frame} rows"
        channels = packing.padded(block.transposed.weight.shape[1])
        residual = self.floats(self._capacity * rows_per_frame, channels)
        units = block.residuals
        inputs = [
            self.buffers.allocate(rows_per_frame, channels, _ONE_PLANE, history_length(unit.conv1))
            for unit in units
        ]
        middle = self.buffers.allocate(rows_per_frame, channels, _ONE_PLANE)
        output = self.buffers.allocate(rows_per_frame, channels, _ONE_PLANE, history_rows)
        snakes = [*(fold_snake(unit.snake1) for unit in units), next_snake]
        transposed = packing.transposed(block.transposed, snakes[0])
        self.project(x, transposed, inputs[0], residual_out=residual, epilogue=Epilogue.SNAKE)
        outputs = [*inputs[1:], output]
        for i, (unit, unit_input, unit_output, snake) in enumerate(
            zip(units, inputs, outputs, snakes[1:], strict=True)
        ):
            conv1 = packing.convolution(unit.conv1, fold_snake(unit.snake2))
            conv2 = packing.convolution(unit.conv2, snake)
            self.residual_unit(
                unit_input,
                conv1,
                middle,
                conv2,
                unit_output,
                residual=residual,
                residual_out=None if unit is units[-1] else residual,  # nothing reads the last sum
                is_reversed=i % 2 == 0,  # the kernels before and behind alternate
            )
        return output


def _split_planes(rows: Tensor, planes: int) -> Tensor:
    """float32 [rows, channels] -> float16 [rows, planes, channels]."""
    rounded = _round(rows)
    return torch.stack([rounded, _round(rows - rounded.float())][:planes], dim=1)


def _round(x: Tensor) -> Tensor:
    """float32 -> the nearest finite float16."""
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest).half()


def _check_shapes(config: CodecConfig) -> None:
    """Refuses shapes that the kernels are not compiled for."""
    codec, stack = config.decoder, config.decoder.stack
    for name, found, wanted in (
        ("sliding_window", codec.sliding_window, (ATTENTION_WINDOW,)),
        ("num_quantizers", codec.num_groups, (NUM_CODEBOOKS,)),
        ("head_dim", stack.head_dim, HEAD_DIMS),
        ("num_key_value_heads", stack.num_kv_heads, (stack.num_heads,)),
    ):
        if found not in wanted:
            raise ValueError(
                f"The codec's kernels are compiled for {name} in {wanted}, found {found}; use the "
                "decoder in plain torch."
            )
    if config.samples_per_frame % SAMPLE_ROWS:
        raise ValueError(
            f"The codec's kernels take frames of a multiple of {SAMPLE_ROWS} samples, found "
            f"{config.samples_per_frame}; use the decoder in plain torch."
        )
    sizes = (
        codec.latent_dim,
        codec.codebook_dim,
        stack.hidden_size,
        stack.intermediate_size,
        stack.num_heads * stack.head_dim,
    )
    if any(size % STEP_CHANNELS for size in sizes) or codec.latent_dim > MAX_DEPTHWISE_CHANNELS:
        raise ValueError(
            f"The codec's kernels take multiples of {STEP_CHANNELS} channels and a latent_dim of "
            f"at most {MAX_DEPTHWISE_CHANNELS:,}, found {sizes}; use the decoder in plain torch."
        )
