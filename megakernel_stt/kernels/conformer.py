"""The streaming encoder on a GPU: cuBLAS products, and kernels between them that use state slots.

A Conformer block takes eight products, two activations in torch and six launches of the kernels in
csrc/conformer. They read what a stream keeps from its source slot and write its target slot, so
that no state is copied by itself.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.kernels.addresses import device_address
from megakernel_common.kernels.loader import LaunchPath, load_module
from megakernel_common.kernels.module import DEFAULT_SHARED_BYTES, KernelModule, LaunchConfig
from megakernel_common.kernels.program import Program
from megakernel_stt.kernels.conformer_structs import (
    BLOCK_THREADS,
    CONFORMER_DECLARATIONS,
    AddNormParams,
    AttendParams,
    ConvolveParams,
    Norm,
    Streams,
)
from megakernel_stt.model.config import EncoderConfig
from megakernel_stt.model.weights import BatchNorm, Linear
from megakernel_stt.network.encoder import EncoderState, StreamingEncoder
from megakernel_stt.network.layers import apply

if TYPE_CHECKING:
    from megakernel_stt.model import weights as trees

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_KERNELS = ("add_norm", "attend", "convolve")
RELEASED_SIZES = 1024, 128, 9  # width, head, taps of all released streaming models
_MAX_HIDDEN = 2048  # a thread keeps its channels of a row in registers
_MAX_TAPS = 31  # and all inputs of a channel's convolution
_VECTOR_BYTES = 16
_MAX_VECTOR_SIZE = 8  # bfloat16 numbers of a vector


def conformer_program(hidden_size: int, head_dim: int, kernel_size: int) -> Program:
    """The program of the kernels.

    Args:
        hidden_size: Width of the encoder.
        head_dim: Width of an attention head.
        kernel_size: Of the depthwise convolution.
    """
    definitions = (
        ("MEGAKERNEL_CONFORMER_HIDDEN", str(hidden_size)),
        ("MEGAKERNEL_CONFORMER_HEAD_DIM", str(head_dim)),
        ("MEGAKERNEL_CONFORMER_TAPS", str(kernel_size)),
    )
    names = tuple(f"conformer_{kernel}_{name}" for kernel in _KERNELS for name in _NAMES.values())
    return Program("conformer", "conformer/kernels.cu", names, CONFORMER_DECLARATIONS, definitions)


def conformer_obstacle(config: EncoderConfig) -> str | None:
    """Returns why the kernels do not fit an encoder, as a sentence, or None."""
    if config.streaming is None:
        return "The kernels take streaming encoders; this one is offline."
    if config.head_dim % _MAX_VECTOR_SIZE or config.hidden_size > _MAX_HIDDEN:
        return (
            f"The kernels take widths up to {_MAX_HIDDEN} and heads of multiples "
            f"of {_MAX_VECTOR_SIZE}; this encoder has {config.hidden_size} and {config.head_dim}."
        )
    if not 1 < config.conv_kernel_size <= _MAX_TAPS:
        return (
            f"The kernels take convolutions of 2 to {_MAX_TAPS} frames; those of this encoder "
            f"have {config.conv_kernel_size}."
        )
    longest = max(config.streaming.lookaheads) + 1
    for dtype in _NAMES:
        needed = _shared_bytes(longest, config.streaming.left_context, config.head_dim, dtype)
        if needed > DEFAULT_SHARED_BYTES:
            return (
                f"The kernels take chunks that need {DEFAULT_SHARED_BYTES} bytes of shared memory; "
                f"those of {longest} frames need {needed}."
            )
    return None


def load_conformer(
    weights: "trees.EncoderWeights", config: EncoderConfig, path: LaunchPath | None = None
) -> "ConformerKernels":
    """Compiles the kernels unless they are cached, and loads them.

    Args:
        weights: The encoder's tensors, on the GPU.
        config: Its sizes, for which `conformer_obstacle` returns None.
        path: How to compile and launch; by default what `support` finds. For tests.

    Raises:
        RuntimeError: The kernels cannot be compiled on this machine.
    """
    program = conformer_program(config.hidden_size, config.head_dim, config.conv_kernel_size)
    module = load_module(program, weights.subsampling.linear.weight.device, path)
    return ConformerKernels(weights, config, module)


class ConformerKernels:
    """The kernels, with the weights in the layouts that they read.

    Attributes:
        weights: The encoder's tensors.
        config: Its sizes.
        qkv: Query, key and value projections of each block as one.
    """

    def __init__(
        self, weights: "trees.EncoderWeights", config: EncoderConfig, module: KernelModule
    ) -> None:
        """Prepares the weights.

        Args:
            weights: The encoder's tensors. Those of query, key and value become views of `qkv`, so
                that no memory is needed twice.
            config: The sizes.
            module: The kernels.
        """
        self.weights, self.config = weights, config
        self._module = module
        like = weights.subsampling.linear.weight
        self._dtype, self._device = like.dtype, like.device
        self.qkv = [_join(block.attention) for block in weights.blocks]
        self._depthwise = [
            block.convolution.depthwise.weight.flatten(1).t().contiguous()
            for block in weights.blocks
        ]

    def streams(
        self,
        sources: Tensor,
        targets: Tensor,
        lengths: Tensor,
        num_frames: Tensor,
        chunk_size: int,
    ) -> Streams:
        """The streams of the launches of a chunk; the tensors must outlive the launches.

        Args:
            sources: [streams] int64, state slots to read.
            targets: [streams] int64, state slots to write.
            lengths: [streams] int64, frames of each stream in all.
            num_frames: [state slots] int64, frames before the chunk.
            chunk_size: Frames.
        """
        named = {"sources": sources, "targets": targets, "lengths": lengths}
        addresses = {
            name: device_address(tensor, torch.int64, name, self._device)
            for name, tensor in (named | {"num_frames": num_frames}).items()
        }
        return Streams(**addresses, chunk_size=chunk_size)

    def add_norm(
        self,
        x: Tensor,
        y: Tensor | None,
        h: Tensor,
        *,
        scale: float = 1.0,
        norm_out: "trees.Norm | None" = None,
        norm_next: "trees.Norm | None" = None,
    ) -> None:
        """Adds a module's output, and normalises for the next module.

        Args:
            x: [streams, chunk, hidden], changed in place: `norm_out(x + scale * y)`.
            y: As `x`; None: nothing is added.
            h: As `x`, receives `norm_next(x)`.
            scale: A power of two.
            norm_out: Of a block's end.
            norm_next: Of the next module; None: `h` is not written.
        """
        params = AddNormParams(
            x=self._address(x, "x"),
            y=0 if y is None else self._address(y, "y"),
            h=self._address(h, "h"),
            norm_out=self._norm(norm_out),
            norm_next=self._norm(norm_next),
            scale=scale,
        )
        self._launch("add_norm", params, x.numel() // x.shape[-1], [x, h])

    def attend(
        self, index: int, streams: Streams, qkv: Tensor, positions: Tensor, states: EncoderState
    ) -> Tensor:
        """Attention of a block's chunk; moves keys and values to the target slots.

        Args:
            index: Of the block.
            streams: Of the launch.
            qkv: [streams, chunk, 3 hidden].
            positions: [heads, distances, head_dim], see `position_keys`.
            states: By state slot.

        Returns:
            [streams, chunk, hidden], without the output projection.
        """
        attention = self.weights.blocks[index].attention
        num_cached, head_dim = states.keys.shape[3:]
        output = qkv.new_empty(*qkv.shape[:2], self.config.hidden_size)
        params = AttendParams(
            streams=streams,
            qkv=self._address(qkv, "qkv"),
            content_bias=self._address(attention.content_bias, "content_bias"),
            position_bias=self._address(attention.position_bias, "position_bias"),
            positions=self._address(positions, "positions"),
            keys=self._layer_address(states.keys, index, "keys"),
            values=self._layer_address(states.values, index, "values"),
            slot_stride=states.keys.stride(0),
            output=self._address(output, "output"),
            num_cached=num_cached,
            root_head_dim=math.sqrt(head_dim),
        )
        shared_bytes = _shared_bytes(qkv.shape[1], num_cached, head_dim, self._dtype)
        num_blocks = qkv.shape[0] * self.config.num_heads
        writes = [output, states.keys, states.values]
        self._launch("attend", params, num_blocks, writes, shared_bytes)
        return output

    def convolve(
        self, index: int, streams: Streams, inputs: Tensor, states: EncoderState
    ) -> Tensor:
        """The convolution module of a block between its products; moves its inputs.

        Args:
            index: Of the block.
            streams: Of the launch.
            inputs: [streams, chunk, 2 hidden], of the first product.
            states: By state slot.

        Returns:
            [streams, chunk, hidden], input of the second product.
        """
        convolution = self.weights.blocks[index].convolution
        norm, bias = convolution.inner_norm, convolution.depthwise.bias
        assert not isinstance(norm, BatchNorm), "a streaming encoder has layer norms"
        output = inputs.new_empty(*inputs.shape[:2], self.config.hidden_size)
        params = ConvolveParams(
            streams=streams,
            input=self._address(inputs, "inputs"),
            weights=self._address(self._depthwise[index], "weights"),
            bias=0 if bias is None else self._address(bias, "bias"),
            norm=self._norm(norm),
            gated=self._layer_address(states.gated, index, "gated"),
            slot_stride=states.gated.stride(0),
            output=self._address(output, "output"),
        )
        num_rows = inputs.shape[0] * inputs.shape[1]
        self._launch("convolve", params, num_rows, [output, states.gated])
        return output

    def _launch(
        self,
        kernel: str,
        params: AddNormParams | AttendParams | ConvolveParams,
        num_blocks: int,
        writes: Sequence[Tensor],
        shared_bytes: int = 0,
    ) -> None:
        config = LaunchConfig(num_blocks, BLOCK_THREADS, shared_bytes)
        name = f"conformer_{kernel}_{_NAMES[self._dtype]}"
        self._module.launch(name, params, config, writes=writes)

    def _norm(self, norm: "trees.Norm | None") -> Norm:
        if norm is None:
            return Norm()
        return Norm(self._address(norm.weight, "weight"), self._address(norm.bias, "bias"))

    def _address(self, tensor: Tensor, name: str) -> int:
        return device_address(tensor, self._dtype, name, self._device)

    def _layer_address(self, tensor: Tensor, index: int, name: str) -> int:
        """The address of a layer of the first state slot of a tensor [slots, layers, ...]."""
        return self._address(tensor, name) + tensor.stride(1) * index * tensor.element_size()


class KernelEncoder(StreamingEncoder):
    """A streaming encoder whose states are in slots."""

    def __init__(self, kernels: ConformerKernels, lookahead: int) -> None:
        """Computes the keys of all distances.

        Args:
            kernels: Of the model.
            lookahead: Frames of a chunk after its first.
        """
        super().__init__(kernels.weights, kernels.config, lookahead)
        self._kernels = kernels
        self._positions = [positions.contiguous() for positions in self._positions]

    def encode_slots(
        self,
        mels: Tensor,
        lengths: Tensor,
        sources: Tensor,
        targets: Tensor,
        states: EncoderState,
    ) -> Tensor:
        """Encodes one chunk of every stream; see `StreamingEncoder.encode`.

        Args:
            mels: [streams, num_mels, bins].
            lengths: [streams] int64, mel frames in all of a stream that ends in the chunk,
                otherwise `ENDLESS`.
            sources: [streams] int64, slots of the states before the chunk.
            targets: [streams] int64, slots for the states after it. None of them is a source.
            states: [slots, ...], changed in place.

        Returns:
            [streams, chunk_size, hidden].
        """
        stages = (states.stage1, states.stage2, states.stage3)
        before = [stage.index_select(0, sources) for stage in stages]
        num_frames = states.num_frames.index_select(0, sources)
        x, last_inputs, length = self._subsample(mels, lengths, before, num_frames)
        x = x.contiguous()
        self._run_blocks(x, length, sources, targets, states)
        for stage, last in zip(stages, last_inputs, strict=True):
            stage.index_copy_(0, targets, last)
        states.num_frames.index_copy_(0, targets, num_frames + self.chunk_size)
        return x

    def _run_blocks(
        self, x: Tensor, lengths: Tensor, sources: Tensor, targets: Tensor, states: EncoderState
    ) -> None:
        """Runs the blocks on frames [streams, chunk_size, hidden] in place."""
        kernels, blocks = self._kernels, self._weights.blocks
        streams = kernels.streams(sources, targets, lengths, states.num_frames, self.chunk_size)
        h = torch.empty_like(x)
        kernels.add_norm(x, None, h, norm_next=blocks[0].feed_forward1.norm)
        for i, block in enumerate(blocks):
            y = _feed_forward(block.feed_forward1, h)
            kernels.add_norm(x, y, h, scale=0.5, norm_next=block.attention.norm)
            attended = kernels.attend(
                i, streams, apply(kernels.qkv[i], h), self._positions[i], states
            )
            y = apply(block.attention.output, attended)
            kernels.add_norm(x, y, h, norm_next=block.convolution.norm)
            convolved = kernels.convolve(
                i, streams, apply(block.convolution.pointwise_in, h), states
            )
            y = apply(block.convolution.pointwise_out, convolved)
            kernels.add_norm(x, y, h, norm_next=block.feed_forward2.norm)
            y = _feed_forward(block.feed_forward2, h)
            following = blocks[i + 1].feed_forward1.norm if i + 1 < len(blocks) else None
            kernels.add_norm(x, y, h, scale=0.5, norm_out=block.norm, norm_next=following)


def _feed_forward(weights: "trees.FeedForward", normed: Tensor) -> Tensor:
    """A feed-forward module of what its norm returned."""
    return apply(weights.down, F.silu(apply(weights.up, normed), inplace=True))


def _join(attention: "trees.Attention") -> Linear:
    """Query, key and value projection as one, of which the separate ones become views."""
    parts = (attention.query, attention.key, attention.value)
    weight = torch.cat([part.weight for part in parts])
    for part, view in zip(parts, weight.chunk(3), strict=True):
        part.weight.data = view
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(weight, torch.cat(biases) if biases else None)


def _shared_bytes(chunk_size: int, num_cached: int, head_dim: int, dtype: torch.dtype) -> int:
    """Shared memory of a thread block of `attend`; see AttendLayout in csrc/conformer."""
    vectors = head_dim * dtype.itemsize // _VECTOR_BYTES
    num_groups = max(BLOCK_THREADS // (chunk_size * vectors), 1)
    outputs = chunk_size * head_dim
    return 4 * ((2 + num_groups) * outputs + chunk_size * (num_cached + chunk_size))
