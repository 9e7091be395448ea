"""The kernels of the encoder: their program, weights in the layouts that they read, launches.

Attention and convolution read what a stream keeps from its source slot and write its target slot,
so that no state is copied by itself.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megakernel_common.kernels.loader import LaunchPath, load_module
from megakernel_common.kernels.module import DEFAULT_SHARED_BYTES, KernelModule
from megakernel_common.kernels.program import Program
from megakernel_stt.kernels.conformer_launcher import NAMES, ConformerLauncher
from megakernel_stt.kernels.conformer_structs import (
    BLOCK_THREADS,
    CONFORMER_DECLARATIONS,
    MAX_FEW_ROWS,
    AddNormParams,
    AttendParams,
    ConvolveParams,
    NormPointers,
    ProjectParams,
    Streams,
)
from megakernel_stt.kernels.subsampling import KernelLogMel, SubsamplingKernels
from megakernel_stt.model.config import EncoderConfig
from megakernel_stt.model.weights import BatchNorm, Linear
from megakernel_stt.network.encoder import EncoderState

if TYPE_CHECKING:
    from megakernel_stt.model import weights as trees

_KERNELS = (
    "add_norm",
    "attend",
    "convolve",
    "log_mel",
    "subsample_mels",
    "subsample",
    "flatten",
)
_LAYERS = ("up", "down", "qkv", "gate", "add")
_ROW_COUNTS = (1, MAX_FEW_ROWS)  # for which each linear layer is compiled
RELEASED_SIZES = 1024, 4096, 128, 9  # of all released streaming models; see `conformer_program`
_MAX_HIDDEN, _MAX_INTERMEDIATE = 1024, 4096  # a thread keeps its weights of `project` in registers
_MAX_TAPS = 31  # and all inputs of a channel's convolution
_OVERLAP_CAPABILITY = 9  # from which a kernel can start while the previous one ends
_VECTOR_BYTES = 16
_NUM_WARPS = BLOCK_THREADS // 32
_MAX_VECTOR_SIZE = 8  # bfloat16 numbers of a vector


def conformer_program(
    hidden_size: int, intermediate_size: int, head_dim: int, kernel_size: int
) -> Program:
    """The program of the kernels.

    Args:
        hidden_size: Width of the encoder.
        intermediate_size: Width inside its feed-forward modules.
        head_dim: Width of an attention head.
        kernel_size: Of the depthwise convolution.
    """
    definitions = (
        ("MEGAKERNEL_CONFORMER_HIDDEN", str(hidden_size)),
        ("MEGAKERNEL_CONFORMER_INTERMEDIATE", str(intermediate_size)),
        ("MEGAKERNEL_CONFORMER_HEAD_DIM", str(head_dim)),
        ("MEGAKERNEL_CONFORMER_TAPS", str(kernel_size)),
    )
    kernels = (*_KERNELS, *(f"{layer}_{rows}" for layer in _LAYERS for rows in _ROW_COUNTS))
    names = tuple(f"conformer_{kernel}_{name}" for kernel in kernels for name in NAMES.values())
    return Program("conformer", "conformer/kernels.cu", names, CONFORMER_DECLARATIONS, definitions)


def sizes_of(config: EncoderConfig) -> tuple[int, int, int, int]:
    """The sizes of an encoder that `conformer_program` takes."""
    return config.hidden_size, config.intermediate_size, config.head_dim, config.conv_kernel_size


def conformer_obstacle(config: EncoderConfig) -> str | None:
    """Returns why the kernels do not fit an encoder, as a sentence, or None."""
    if config.streaming is None:
        return "The kernels take streaming encoders; this one is offline."
    if config.head_dim % _MAX_VECTOR_SIZE or config.hidden_size > _MAX_HIDDEN:
        return (
            f"The kernels take widths up to {_MAX_HIDDEN} and heads of multiples "
            f"of {_MAX_VECTOR_SIZE}; this encoder has {config.hidden_size} and {config.head_dim}."
        )
    if config.intermediate_size % _MAX_VECTOR_SIZE or config.intermediate_size > _MAX_INTERMEDIATE:
        return (
            f"The kernels take feed-forward modules of multiples of {_MAX_VECTOR_SIZE} up to "
            f"{_MAX_INTERMEDIATE}; those of this encoder have {config.intermediate_size}."
        )
    if not 1 < config.conv_kernel_size <= _MAX_TAPS:
        return (
            f"The kernels take convolutions of 2 to {_MAX_TAPS} frames; those of this encoder "
            f"have {config.conv_kernel_size}."
        )
    if config.subsampling_channels % _MAX_VECTOR_SIZE:
        return (
            f"The kernels take subsampling with multiples of {_MAX_VECTOR_SIZE} channels; that of "
            f"this encoder has {config.subsampling_channels}."
        )
    longest = max(config.streaming.lookaheads) + 1
    for dtype in NAMES:
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
    device = weights.subsampling.linear.weight.device
    module = load_module(conformer_program(*sizes_of(config)), device, path)
    capability = torch.cuda.get_device_properties(device).major
    overlap = capability >= _OVERLAP_CAPABILITY
    return ConformerKernels(weights, config, module, overlap=overlap)


class ConformerKernels:
    """The kernels, with the weights in the layouts that they read.

    Attributes:
        weights: The encoder's tensors.
        config: Its sizes.
        launcher: Launches kernels.
        log_mel: Features.
        subsampling: Mel frames to the input of the blocks.
        qkv: Query, key and value projections of each block as one.
    """

    def __init__(
        self,
        weights: "trees.EncoderWeights",
        config: EncoderConfig,
        module: KernelModule,
        *,
        overlap: bool,
    ) -> None:
        """Prepares the weights.

        Args:
            weights: The encoder's tensors. Those of query, key and value become views of `qkv`, so
                that no memory is needed twice.
            config: The sizes.
            module: The kernels.
            overlap: Whether the GPU can start a kernel while the previous one ends.
        """
        self.weights, self.config = weights, config
        like = weights.subsampling.linear.weight
        self.launcher = ConformerLauncher(module, like.dtype, like.device, overlap=overlap)
        self.log_mel = KernelLogMel(self.launcher, config.num_mels)
        self.subsampling = SubsamplingKernels(self.launcher, weights.subsampling)
        self.qkv = [_join(block.attention) for block in weights.blocks]
        self._depthwise = [
            block.convolution.depthwise.weight.flatten(1).t().contiguous()
            for block in weights.blocks
        ]

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
            x=self.launcher.address(x, "x"),
            y=0 if y is None else self.launcher.address(y, "y"),
            h=self.launcher.address(h, "h"),
            norm_out=self._norm(norm_out),
            norm_next=self._norm(norm_next),
            scale=scale,
        )
        self.launcher.launch("add_norm", params, x.numel() // x.shape[-1], [x, h])

    def project(
        self,
        name: str,
        layer: Linear,
        inputs: Tensor,
        output: Tensor,
        *,
        norm: "trees.Norm | None" = None,
        norm_out: "trees.Norm | None" = None,
        normed_out: Tensor | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """A linear layer of at most `MAX_FEW_ROWS` rows, with what precedes and follows it.

        Args:
            name: Of the kernel: `up`, `down`, `qkv`, `gate` or `add`.
            layer: Its weights.
            inputs: [streams, chunk, in].
            output: [streams, chunk, out], may be `residual`.
            norm: Of the inputs, before the product.
            norm_out: Norm at the end of the block before, which precedes `norm`.
            normed_out: As `inputs`, receives what `norm_out` returns.
            residual: As `output`: `residual + scale * product` is returned.
            scale: A power of two.
        """
        rows = inputs.shape[0] * inputs.shape[1]
        weight = layer.weight.flatten(1)
        params = ProjectParams(
            input=self.launcher.address(inputs, "inputs"),
            weights=self.launcher.address(weight, "weights"),
            bias=0 if layer.bias is None else self.launcher.address(layer.bias, "bias"),
            norm_out=self._norm(norm_out),
            norm=self._norm(norm),
            normed_out=0 if normed_out is None else self.launcher.address(normed_out, "normed_out"),
            residual=0 if residual is None else self.launcher.address(residual, "residual"),
            output=self.launcher.address(output, "output"),
            num_rows=rows,
            scale=scale,
        )
        capacity = next(count for count in _ROW_COUNTS if count >= rows)
        shared_bytes = 0 if norm is None else capacity * weight[0].nbytes
        writes = [output] if normed_out is None else [output, normed_out]
        num_blocks = -(-len(weight) // (_NUM_WARPS * self._warp_columns(len(weight))))
        self.launcher.launch(f"{name}_{capacity}", params, num_blocks, writes, shared_bytes)

    def _warp_columns(self, num_outputs: int) -> int:
        """Outputs of a warp of `project`; `kWarpColumns` in csrc/conformer."""
        widest = max(self.config.intermediate_size, 3 * self.config.hidden_size)
        return -(-num_outputs // max(widest // 4, 1024))

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
            qkv=self.launcher.address(qkv, "qkv"),
            content_bias=self.launcher.address(attention.content_bias, "content_bias"),
            position_bias=self.launcher.address(attention.position_bias, "position_bias"),
            positions=self.launcher.address(positions, "positions"),
            keys=self._layer_address(states.keys, index, "keys"),
            values=self._layer_address(states.values, index, "values"),
            slot_stride=states.keys.stride(0),
            output=self.launcher.address(output, "output"),
            num_cached=num_cached,
            root_head_dim=math.sqrt(head_dim),
        )
        shared_bytes = _shared_bytes(qkv.shape[1], num_cached, head_dim, self.launcher.dtype)
        num_blocks = qkv.shape[0] * self.config.num_heads
        writes = [output, states.keys, states.values]
        self.launcher.launch("attend", params, num_blocks, writes, shared_bytes)
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
            input=self.launcher.address(inputs, "inputs"),
            weights=self.launcher.address(self._depthwise[index], "weights"),
            bias=0 if bias is None else self.launcher.address(bias, "bias"),
            norm=self._norm(norm),
            gated=self._layer_address(states.gated, index, "gated"),
            slot_stride=states.gated.stride(0),
            output=self.launcher.address(output, "output"),
        )
        num_rows = inputs.shape[0] * inputs.shape[1]
        self.launcher.launch("convolve", params, num_rows, [output, states.gated])
        return output

    def _norm(self, norm: "trees.Norm | None") -> NormPointers:
        if norm is None:
            return NormPointers()
        return NormPointers(
            self.launcher.address(norm.weight, "weight"), self.launcher.address(norm.bias, "bias")
        )

    def _layer_address(self, tensor: Tensor, index: int, name: str) -> int:
        """The address of a layer of the first state slot of a tensor [slots, layers, ...]."""
        return (
            self.launcher.address(tensor, name) + tensor.stride(1) * index * tensor.element_size()
        )


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
