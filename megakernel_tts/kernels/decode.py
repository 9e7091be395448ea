"""The decode kernels of a model: their program, limits, workspace and launches."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megakernel_common.kernels.build import architecture_of
from megakernel_common.kernels.loader import LaunchPath, load_module
from megakernel_common.kernels.module import KernelModule, LaunchConfig
from megakernel_common.kernels.program import ARCHITECTURES, Program
from megakernel_tts.kernels.prefill_spans import num_launchable
from megakernel_tts.kernels.structs import (
    DECODE_DECLARATIONS,
    HEAD_DIM,
    NUM_CODE_GROUPS,
    DecodeInfo,
    Params,
    PrefillBatch,
    WidePrefillBatch,
)
from megakernel_tts.kernels.wide import (
    WideKernel,
    compiled_widths,
    kernel_names,
    least_blocks,
    narrow_limit,
    needed_widths,
    write_addresses,
)
from megakernel_tts.model.config import ModelConfig, StackConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BATCH: np.dtype[Any] = np.dtype(PrefillBatch)
_L2_SHARE = 5  # a talker layer's keys and values may take one fifth of the L2 cache
_KERNELS = (
    "generate_single",
    "generate_streams",
    "prefill_small",
    "prefill_medium",
    "prefill_large",
)


@dataclass(frozen=True)
class DecodeVariant:
    """A build for measurements or tests.

    Attributes:
        profile: The kernels count the cycles of every phase.
        precise: Activations, keys and values are sums of two bfloat16 numbers.
    """

    profile: bool = False
    precise: bool = False


ORDINARY = DecodeVariant()


class StackShape(NamedTuple):
    """The shape of a decoder stack."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


@dataclass(frozen=True)
class GpuProperties:
    """What a launch depends on.

    Attributes:
        num_multiprocessors: Multiprocessors of the GPU.
        l2_bytes: Size of its L2 cache.
    """

    num_multiprocessors: int
    l2_bytes: int


def check_shapes(config: ModelConfig) -> None:
    """Checks that the kernels can be compiled for a model.

    Args:
        config: The model's numbers.

    Raises:
        ValueError: They cannot; the message says why.
    """
    talker, predictor = config.talker.stack, config.predictor.stack
    rules = [
        (talker.rope_theta == predictor.rope_theta, "one rope_theta for talker and predictor"),
        (talker.norm_eps == predictor.norm_eps, "one rms_norm_eps for talker and predictor"),
        (config.talker.num_groups == NUM_CODE_GROUPS, f"{NUM_CODE_GROUPS} code groups"),
        (config.talker.num_codes % 8 == 0, "a multiple of 8 codes"),
    ]
    for stack in (talker, predictor):
        rules += [
            (stack.head_dim == HEAD_DIM, f"heads of {HEAD_DIM} channels"),
            (stack.num_heads == 2 * stack.num_kv_heads, "two query heads for each key-value head"),
            (stack.hidden_size % 32 == 0, "a hidden size that is a multiple of 32"),
            (stack.intermediate_size % 32 == 0, "an intermediate size that is a multiple of 32"),
        ]
    for holds, rule in rules:
        if not holds:
            raise ValueError(
                f"The kernels take {rule}; the model has {talker} and {predictor}. Use "
                "dtype='float32' for plain torch."
            )


def decode_program(
    config: ModelConfig, variant: DecodeVariant = ORDINARY, num_streams: int = 0
) -> Program:
    """The program of a model's decode kernels.

    Args:
        config: The model's numbers.
        variant: The build.
        num_streams: Streams of the wide kernel; 0 for the kernels of few streams.

    Raises:
        ValueError: The kernels cannot be compiled for the model.
    """
    check_shapes(config)
    return program_of_shapes(
        stack_shape(config.talker.stack),
        stack_shape(config.predictor.stack),
        config.talker.num_codes,
        variant,
        num_streams,
    )


def program_of_shapes(
    talker: StackShape,
    predictor: StackShape,
    num_codes: int,
    variant: DecodeVariant = ORDINARY,
    num_streams: int = 0,
) -> Program:
    """The program of the decode kernels for some shapes.

    Args:
        talker: The talker's.
        predictor: The code predictor's.
        num_codes: Codes of a codebook.
        variant: The build.
        num_streams: Streams of the wide kernel; 0 for the kernels of few streams.
    """
    shapes = f"{_stack_type(talker)}, {_stack_type(predictor, True)}, {num_codes}"
    definitions = [("MEGAKERNEL_MODEL", f"megakernel::Model<{shapes}>")]
    if variant.profile:
        definitions.append(("MEGAKERNEL_PROFILE", "1"))
    if variant.precise:
        definitions.append(("MEGAKERNEL_PRECISE", "1"))
    if num_streams:
        definitions.append(("MEGAKERNEL_WIDE_STREAMS", str(num_streams)))
    architectures = tuple(
        architecture
        for architecture in ARCHITECTURES
        if not num_streams or num_streams in compiled_widths(architecture)
    )
    return Program(
        "decode",
        "decode/kernels.cu",
        kernel_names(num_streams) if num_streams else _KERNELS,
        DECODE_DECLARATIONS,
        tuple(definitions),
        architectures,
    )


def stack_shape(stack: StackConfig) -> StackShape:
    """The shape of a stack."""
    return StackShape(
        stack.hidden_size, stack.num_heads, stack.num_kv_heads, stack.intermediate_size
    )


def _stack_type(shape: StackShape, short_context: bool = False) -> str:
    """A `Stack` of csrc/shapes.cuh; the code predictor attends to few positions."""
    arguments = [*map(str, shape), *(["true"] if short_context else [])]
    return f"megakernel::Stack<{', '.join(arguments)}>"


def load_decode_kernels(
    config: ModelConfig,
    device: "torch.device",
    variant: DecodeVariant = ORDINARY,
    path: LaunchPath | None = None,
    num_streams: int = 1,
) -> "DecodeKernels":
    """Compiles a model's decode kernels unless they are cached, and loads them.

    Args:
        config: The model's numbers.
        device: The GPU.
        variant: The build. The precise one has no wide kernels.
        num_streams: Streams at a time, for which wide kernels are loaded.
        path: How to compile and launch; by default the one for this machine. For tests.

    Raises:
        RuntimeError: The kernels cannot be compiled here.
        ValueError: The kernels cannot be compiled for the model.
    """
    import torch

    properties = torch.cuda.get_device_properties(device)
    gpu = GpuProperties(properties.multi_processor_count, properties.L2_cache_size)
    kernels = DecodeKernels(load_module(decode_program(config, variant), device, path), gpu)
    if not variant.precise:
        widths = needed_widths(architecture_of(device), num_streams, kernels.info.max_streams)
        for width in widths:
            program = decode_program(config, variant, width)
            kernels.add_wide(load_module(program, device, path), config)
    return kernels


class DecodeKernels:
    """Launches the decode kernels of one model on one GPU.

    Attributes:
        info: Facts about the build.
        num_blocks: Thread blocks of every launch: one a multiprocessor, as far as each has rows.
        wide: Kernels for more streams than `narrow_limit`, in ascending order.
    """

    def __init__(self, module: KernelModule, gpu: GpuProperties) -> None:
        """Reads the build's facts.

        Args:
            module: The compiled kernels.
            gpu: The GPU.
        """
        self._module, self._gpu = module, gpu
        self.info = module.read("decode_info", DecodeInfo)
        self.num_blocks = min(gpu.num_multiprocessors, self.info.max_blocks)
        small, medium, large = (
            self._config(shared_bytes)
            for shared_bytes in (
                self.info.shared_bytes_one_column,
                self.info.shared_bytes_streams,
                self.info.shared_bytes_large_prefill,
            )
        )
        self._configs: dict[str, LaunchConfig] = dict(
            zip(_KERNELS, (small, medium, small, medium, large), strict=True)
        )
        self.wide: list[WideKernel] = []

    def add_wide(self, module: KernelModule, config: ModelConfig) -> None:
        """Adds a wide kernel, unless the GPU has too few multiprocessors for the model's residual.

        Args:
            module: The compiled kernel, for more streams than those before it.
            config: The model's numbers.
        """
        kernel = WideKernel(module, self.num_blocks)
        if self.num_blocks >= least_blocks(config, kernel.info):
            self.wide.append(kernel)

    @property
    def max_streams(self) -> int:
        """Streams of a launch at most."""
        return self.wide[-1].info.max_streams if self.wide else self.info.max_streams

    @property
    def narrow_limit(self) -> int:
        """Streams up to which `generate` is used; more take `generate_wide`."""
        widths = [kernel.info.max_streams for kernel in self.wide]
        return narrow_limit(widths, self.info.max_streams)

    @property
    def max_wide_prefill_columns(self) -> int:
        """Columns of a wide prefill batch at most; 0 if no wide kernel takes prompts."""
        return max((kernel.info.max_prefill_columns for kernel in self.wide), default=0)

    @property
    def num_workspace_values(self) -> int:
        """Values of the workspace, of the kernel that needs most."""
        return max(info.workspace.num_values for info in (self.info, *(k.info for k in self.wide)))

    def _config(self, shared_bytes: int) -> LaunchConfig:
        return LaunchConfig(self.num_blocks, self.info.num_threads, shared_bytes, cooperative=True)

    def check_gpu(self, config: ModelConfig) -> None:
        """Checks that the GPU has enough multiprocessors for a model's residual.

        Args:
            config: The model's numbers.

        Raises:
            ValueError: It has not.
        """
        least = least_blocks(config, self.info)
        if self.num_blocks < least:
            raise ValueError(
                f"The model needs a GPU of {least} multiprocessors, found "
                f"{self._gpu.num_multiprocessors}; use dtype='float32' for plain torch."
            )

    def l2_resident_positions(self, stack: StackConfig) -> int:
        """Positions of a talker layer whose keys and values stay in the L2 cache.

        Args:
            stack: The talker's stack.
        """
        position_bytes = 2 * stack.num_kv_heads * self.info.kv_width * 2  # bf16 keys and values
        return self._gpu.l2_bytes // _L2_SHARE // position_bytes

    def set_workspace(self, params: Params, workspace: "Tensor") -> None:
        """Writes the addresses of the workspace's buffers.

        Args:
            params: Where they go.
            workspace: int32 [num_workspace_values], on the GPU.
        """
        if workspace.numel() != self.num_workspace_values:
            raise ValueError(
                f"The workspace must have {self.num_workspace_values} values, found "
                f"{workspace.numel()}."
            )
        write_addresses(params, workspace.data_ptr(), self.info.workspace)

    def generate_wide(
        self, params: Params, streams: int, workspace: "Tensor", writes: Sequence["Tensor"]
    ) -> None:
        """Launches the generation of frames by the narrowest wide kernel; does not wait.

        Args:
            params: The argument; `num_streams` and `max_frames` say what to generate.
            streams: Address of the `StreamParams` [streams] on the GPU.
            workspace: The workspace.
            writes: Other tensors that the kernel writes.
        """
        kernel = next(k for k in self.wide if k.info.max_streams >= params.num_streams)
        kernel.generate(params, streams, workspace, writes)

    def generate(self, params: Params, workspace: "Tensor", writes: Sequence["Tensor"]) -> None:
        """Launches the generation of frames of at most `info.max_streams`; does not wait.

        Args:
            params: The argument; `num_streams`, `streams` and `max_frames` say what to generate.
            workspace: The workspace.
            writes: Other tensors that the kernel writes.
        """
        kernel = "generate_single" if params.num_streams == 1 else "generate_streams"
        self._launch(kernel, params, workspace, writes)

    def prefill(
        self,
        params: Params,
        batches: "ctypes.Array[PrefillBatch]",
        num_positions: int,
        workspace: "Tensor",
        writes: Sequence["Tensor"],
    ) -> None:
        """Launches prefill batches, consecutive ones of one kernel together; does not wait.

        Args:
            params: The argument; `prefill_batches` points to the first batch on the GPU.
            batches: The same batches on the host.
            num_positions: Of the longest prompt, up to the last one in a batch.
            workspace: The workspace.
            writes: Other tensors that the kernels write.
        """
        first = params.prefill_batches.value
        for kernel, num_batches in self._prefill_launches(batches, num_positions):
            params.num_prefill_batches = num_batches
            params.prefill_batches = first
            self._launch(kernel, params, workspace, writes)
            first += num_batches * ctypes.sizeof(PrefillBatch)

    def prefill_wide(
        self,
        params: Params,
        first: int,
        batches: "ctypes.Array[WidePrefillBatch]",
        workspace: "Tensor",
        writes: Sequence["Tensor"],
    ) -> None:
        """Launches prefill batches, each by the narrowest wide kernel for it; does not wait.

        Args:
            params: The argument.
            first: Address of the first batch on the GPU.
            batches: The same batches on the host, of at most `max_wide_prefill_columns` columns.
            workspace: The workspace.
            writes: Other tensors that the kernels write.
        """
        for i, batch in enumerate(batches):
            kernel = next(k for k in self.wide if k.info.max_prefill_columns >= batch.num_columns)
            kernel.prefill(params, first + i * ctypes.sizeof(batch), workspace, writes)

    def _prefill_launches(
        self, batches: "ctypes.Array[PrefillBatch]", num_positions: int
    ) -> Iterator[tuple[str, int]]:
        """The kernel and the number of batches of each launch."""
        begin = 0
        for kernel, run in groupby(self._prefill_kernel(batch.num_columns) for batch in batches):
            end = begin + len([*run])
            if num_positions <= self.info.span_size:  # every column has one span
                yield kernel, end - begin
                begin = end
            while begin < end:
                records = np.frombuffer(memoryview(batches), _BATCH)[begin:end]
                num_batches = num_launchable(records, self.info.span_size)
                yield kernel, num_batches
                begin += num_batches

    def _prefill_kernel(self, num_columns: int) -> str:
        """The kernel for so many columns: the fewer, the more shared memory for weights."""
        if num_columns <= self.info.small_prefill_columns:
            return "prefill_small"
        return "prefill_medium" if num_columns <= self.info.max_streams else "prefill_large"

    def _launch(
        self, kernel: str, params: Params, workspace: "Tensor", writes: Sequence["Tensor"]
    ) -> None:
        num_values = self.info.workspace.num_values
        used = workspace if workspace.numel() == num_values else workspace[:num_values]
        self._module.launch(kernel, params, self._configs[kernel], writes=writes, set_bits=used)
