"""Wide decode kernels: one launch for up to 64 streams, or for as many positions of prompts."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from megakernel_common.kernels.module import KernelModule, LaunchConfig
from megakernel_tts.kernels.structs import (
    EXCHANGE_BUFFERS,
    WIDE_BUFFERS,
    DecodeInfo,
    Params,
    WorkspaceOffsets,
)
from megakernel_tts.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

# Architecture -> streams of the wide kernels for which registers and shared memory suffice.
_WIDTHS = {
    "80": (8, 16),
    "86": (8, 16, 32),
    "89": (8, 16, 32),
    "90a": (8, 16, 32, 48, 64),
    "100a": (8, 16, 32, 64),  # 48 would spill registers
    "120a": (8, 16, 32),
}
_WIDTHS_OF_OTHERS = (8, 16)
# Streams up to which a launch takes the kernels for few streams although a wide one of 8 exists.
# On an H200 these take 14 to 19 % less time than that with one stream, and at most 4 % more with
# two to four.
_NARROW_LIMIT = 4
_MIN_PREFILL_WIDTH = 32  # of the kernels that prefill
_VALUE_BYTES = 4  # of a value of the workspace
_SINGLE_BUFFERS = ("predictor_input", "sampled_codes", "non_finite", "abort_flag")


def kernel_names(width: int) -> tuple[str, ...]:
    """The kernels of the program of a width."""
    return ("generate_wide", "prefill_wide") if width >= _MIN_PREFILL_WIDTH else ("generate_wide",)


def compiled_widths(architecture: str) -> tuple[int, ...]:
    """The wide kernels that exist for an architecture.

    Args:
        architecture: As nvcc names it, such as `90a`.
    """
    return _WIDTHS.get(architecture, _WIDTHS_OF_OTHERS)


def all_widths() -> list[int]:
    """The wide kernels that exist for some architecture, in ascending order."""
    return sorted({*_WIDTHS_OF_OTHERS}.union(*_WIDTHS.values()))


def narrow_limit(widths: Sequence[int], narrow_capacity: int) -> int:
    """Streams up to which a launch uses the kernels for few streams.

    These are as many as they take, or fewer if a wide kernel takes no more than they do.

    Args:
        widths: Streams of the wide kernels, in ascending order.
        narrow_capacity: Streams that the kernels for few streams take.
    """
    has_alternative = len(widths) > 0 and widths[0] <= narrow_capacity
    return min(_NARROW_LIMIT, narrow_capacity) if has_alternative else narrow_capacity


def needed_widths(architecture: str, num_streams: int, narrow_capacity: int) -> tuple[int, ...]:
    """The wide kernels that launches of up to so many streams use.

    Args:
        architecture: As nvcc names it.
        num_streams: Streams of a launch at most.
        narrow_capacity: Streams that the kernels for few streams take.
    """
    widths = compiled_widths(architecture)
    limits = (narrow_limit(widths, narrow_capacity), *widths)
    return tuple(width for less, width in pairwise(limits) if less < num_streams)


def least_blocks(config: ModelConfig, info: DecodeInfo) -> int:
    """Thread blocks that hold the rows of a model's residual.

    Args:
        config: The model's numbers.
        info: Facts about the build.
    """
    hidden = max(config.talker.stack.hidden_size, config.predictor.stack.hidden_size)
    return -(-hidden // info.max_residual_rows)


def write_addresses(params: Params, begin: int, offsets: WorkspaceOffsets) -> None:
    """Writes the addresses of a workspace's buffers.

    Args:
        params: Where they go.
        begin: Address of the workspace.
        offsets: Where its buffers begin.
    """

    def address(offset: int) -> int:
        return begin + _VALUE_BYTES * offset

    for name in _SINGLE_BUFFERS:
        setattr(params, name, address(getattr(offsets, name)))
    for network in ("talker", "predictor"):
        exchange = getattr(params, network).exchange
        for name in EXCHANGE_BUFFERS:
            setattr(exchange, name, address(getattr(getattr(offsets, network), name)))
        wide, wide_offsets = getattr(params, f"wide_{network}"), getattr(offsets, f"wide_{network}")
        for name in WIDE_BUFFERS:
            setattr(wide, name, address(getattr(wide_offsets, name)))


class WideKernel:
    """Launches the wide kernels of one model for up to so many columns.

    Attributes:
        info: Facts about the build; `max_streams` is the number of streams, `max_prefill_columns`
            that of prompt positions, or 0 if the build has no kernel for prompts.
    """

    def __init__(self, module: KernelModule, num_blocks: int) -> None:
        """Reads the build's facts.

        Args:
            module: The compiled kernel.
            num_blocks: Thread blocks of a launch.
        """
        self._module = module
        self.info = module.read("decode_info", DecodeInfo)
        self._config = LaunchConfig(
            num_blocks, self.info.num_threads, self.info.shared_bytes_streams, cooperative=True
        )

    def generate(
        self, params: Params, streams: int, workspace: "Tensor", writes: Sequence["Tensor"]
    ) -> None:
        """Launches the generation of frames; does not wait.

        Args:
            params: The argument; `num_streams` and `max_frames` say what to generate.
            streams: Address of the `StreamParams` [streams] on the GPU.
            workspace: int32, at least `info.workspace.num_values`, on the GPU.
            writes: Other tensors that the kernel writes.
        """
        own = Params.from_buffer_copy(params)
        own.wide_streams = streams
        self._launch("generate_wide", own, workspace, writes)

    def prefill(
        self, params: Params, batch: int, workspace: "Tensor", writes: Sequence["Tensor"]
    ) -> None:
        """Launches a batch of prompts; does not wait.

        Args:
            params: The argument; `prompt_vectors` are those of all batches.
            batch: Address of the `WidePrefillBatch` on the GPU, of at most
                `info.max_prefill_columns` columns.
            workspace: As in `generate`.
            writes: Other tensors that the kernel writes.
        """
        own = Params.from_buffer_copy(params)
        own.wide_prefill_batch = batch
        self._launch("prefill_wide", own, workspace, writes)

    def _launch(
        self, kernel: str, own: Params, workspace: "Tensor", writes: Sequence["Tensor"]
    ) -> None:
        """Launches a kernel; `own` is a copy of the argument."""
        write_addresses(own, workspace.data_ptr(), self.info.workspace)
        self._module.launch(
            kernel,
            own,
            self._config,
            writes=writes,
            set_bits=workspace[: self.info.workspace.num_values],
        )
