"""The alignment kernels: their program, the partition of the work, launches."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megakernel_common.kernels.loader import LaunchPath, load_module
from megakernel_common.kernels.module import KernelModule, LaunchConfig
from megakernel_common.kernels.program import Program
from megakernel_tts.kernels.align_structs import (
    ALIGN_DECLARATIONS,
    AlignInfo,
    Lengths,
    MaskParams,
    PathParams,
    SearchParams,
)

_SCORE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ELEMENT_SIZES = (1, 2, 4, 8)
_WORD_BYTES = 4  # of the workspace
_COPY_BYTES = 4  # of the smallest copy of scores
_RESERVED_SHARED_BYTES = 1024  # of a thread block, by CUDA
_OVERLAP_CAPABILITY = 9  # compute capability with programmatic dependent launch


@dataclass(frozen=True)
class AlignGpu:
    """Properties of a GPU that the partition of the work depends on.

    Attributes:
        num_sms: Multiprocessors.
        shared_bytes_per_block: Largest shared memory of a thread block.
        shared_bytes_per_sm: Shared memory of a multiprocessor.
        overlap: Whether it can start a kernel while the previous one ends.
    """

    num_sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    overlap: bool


@dataclass(frozen=True)
class SearchPlan:
    """The partition of a search and the layout of its workspace.

    Attributes:
        params: The kernel's argument without addresses and strides.
        shared_directions: Whether an item's directions fit in its only block's shared memory.
        num_counter_words: Words of the workspace for the counters; 0: no other block is awaited.
        num_edge_words: Words for the edges between blocks.
        num_direction_words: Words for the directions.
        config: The geometry of the launch.
    """

    params: SearchParams
    shared_directions: bool
    num_counter_words: int
    num_edge_words: int
    num_direction_words: int
    config: LaunchConfig


def make_plan(
    info: AlignInfo,
    gpu: AlignGpu,
    shape: tuple[int, int, int],
    tile_bytes: int,
    *,
    max_strips_per_block: int | None = None,
    num_score_stages: int | None = None,
) -> SearchPlan:
    """Partitions a search.

    Args:
        info: Facts about the kernels.
        gpu: The GPU.
        shape: Items, rows and columns.
        tile_bytes: Size of a tile of scores.
        max_strips_per_block: Strips of a block; by default as many as the kernels take.
        num_score_stages: Tiles of scores of a strip; by default as many as fit shared memory.
    """
    num_items, num_rows, num_columns = shape
    num_strips = -(-num_rows // info.strip_rows)
    num_tiles = -(-num_columns // info.tile_columns)
    strips_per_block = min(num_strips, max_strips_per_block or info.max_strips_per_block)
    blocks_per_item = -(-num_strips // strips_per_block)
    num_words = info.words_per_tile * num_tiles  # of a row's directions
    shared_directions = blocks_per_item == 1 and (
        num_words <= info.window_words - info.padding_words
    )
    trace_bytes = info.trace_shared_bytes
    if num_score_stages is None:
        # Up to max_blocks_per_sm blocks share a multiprocessor's memory; fewer have more each.
        blocks_per_sm = min(-(-num_items * blocks_per_item // gpu.num_sms), info.max_blocks_per_sm)
        share = gpu.shared_bytes_per_sm // blocks_per_sm - _RESERVED_SHARED_BYTES
        fixed = info.static_shared_bytes + (trace_bytes if shared_directions else 0)
        free_bytes = min(gpu.shared_bytes_per_block, share) - fixed
        num_fitting = free_bytes // (strips_per_block * tile_bytes)
        num_score_stages = max(1, min(num_fitting, info.max_score_stages))
    stage_bytes = strips_per_block * num_score_stages * tile_bytes
    return SearchPlan(
        SearchParams(
            num_items=num_items,
            num_rows=num_rows,
            num_columns=num_columns,
            text_lengths=Lengths(common=num_rows),
            frame_lengths=Lengths(common=num_columns),
            num_strips=num_strips,
            num_tiles=num_tiles,
            strips_per_block=strips_per_block,
            blocks_per_item=blocks_per_item,
            num_score_stages=num_score_stages,
        ),
        shared_directions,
        num_counter_words=(1 + num_items + 3) // 4 * 4 if blocks_per_item > 1 else 0,
        num_edge_words=num_items * (blocks_per_item - 1) * num_tiles * info.tile_columns,
        num_direction_words=(
            0 if shared_directions else num_items * num_strips * num_words * info.strip_rows
        ),
        config=LaunchConfig(
            num_items * blocks_per_item,
            64 * strips_per_block,
            trace_bytes + stage_bytes if shared_directions else max(stage_bytes, trace_bytes),
        ),
    )


def align_program() -> Program:
    """The program of the alignment kernels."""
    kernels = (
        *(
            f"align_search_{score}{aligned}{shared}"
            for score in _SCORE_NAMES.values()
            for aligned in ("", "_aligned")
            for shared in ("", "_shared")
        ),
        *(f"align_path_{size}" for size in _ELEMENT_SIZES),
        "align_count_lengths",
    )
    return Program("align", "align/kernels.cu", kernels, ALIGN_DECLARATIONS)


def load_align_kernels(device: torch.device, path: LaunchPath | None = None) -> "AlignKernels":
    """Compiles the alignment kernels unless they are cached, and loads them.

    Args:
        device: The GPU.
        path: How to compile and launch; by default what `support` finds. For tests.

    Raises:
        RuntimeError: The kernels cannot be compiled on this machine.
    """
    properties = torch.cuda.get_device_properties(device)
    gpu = AlignGpu(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
        overlap=properties.major >= _OVERLAP_CAPABILITY,
    )
    return AlignKernels(load_module(align_program(), device, path), gpu)


class AlignKernels:
    """Launches the alignment kernels on one GPU, on torch's current stream; does not wait."""

    def __init__(self, module: KernelModule, gpu: AlignGpu) -> None:
        """Reads the facts about the kernels.

        Args:
            module: The compiled kernels.
            gpu: The GPU.
        """
        self._module, self._gpu = module, gpu
        self.info = module.read("align_info", AlignInfo)
        self._plan = cache(self._make_plan)

    def _make_plan(self, shape: tuple[int, int, int], tile_bytes: int) -> SearchPlan:
        return make_plan(self.info, self._gpu, shape, tile_bytes)

    def tile_bytes(self, dtype: torch.dtype) -> int:
        """Size of a tile of scores."""
        info = self.info
        return info.float32_tile_bytes if dtype == torch.float32 else info.half_tile_bytes

    def search(
        self,
        scores: Tensor,
        text_lengths: Tensor | None,
        frame_lengths: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Launches a search.

        Args:
            scores: float32, bfloat16 or float16 [items, tokens, frames] on the GPU.
            text_lengths: int32 or int64 [items], on any device.
            frame_lengths: int32 or int64 [items], on any device.
            mask: In place of lengths, of the scores' shape and device.

        Returns:
            Durations, int32 [items, tokens].

        Raises:
            ValueError: Shapes, dtypes or devices do not match.
        """
        _check_search(scores, text_lengths, frame_lengths, mask)
        if scores.numel() == 0:
            return scores.new_zeros(scores.shape[:2], dtype=torch.int32)
        rows, alignment = _readable(scores)
        if mask is not None:
            text_lengths, frame_lengths = self.count_lengths(mask).unbind()
        else:
            text_lengths, frame_lengths = (
                None if each is None else each.to(rows.device).contiguous()
                for each in (text_lengths, frame_lengths)
            )
        aligned = alignment >= self.info.step_columns * rows.element_size()
        items, tokens, frames = rows.shape
        plan = self._plan((items, tokens, frames), self.tile_bytes(rows.dtype))
        return self.launch_search(rows, text_lengths, frame_lengths, plan, aligned=aligned)

    def launch_search(
        self,
        rows: Tensor,
        text_lengths: Tensor | None,
        frame_lengths: Tensor | None,
        plan: SearchPlan,
        *,
        aligned: bool,
    ) -> Tensor:
        """Launches a search of scores that the kernel reads as they are.

        Args:
            rows: Scores [items, tokens, frames] with adjacent frames, not empty.
            text_lengths: int32 or int64 [items] on the GPU.
            frame_lengths: int32 or int64 [items] on the GPU.
            plan: The partition.
            aligned: Whether every fourth score of a row can be copied with the next three.

        Returns:
            Durations, int32 [items, tokens].
        """
        items, tokens, frames = rows.shape
        durations = rows.new_empty((items, tokens), dtype=torch.int32)
        writes = [durations]
        params = SearchParams.from_buffer_copy(plan.params)
        params.scores = rows.data_ptr()
        params.item_stride = rows.stride(0)
        step = self.info.step_columns
        params.row_stride = rows.stride(1) if tokens > 1 else -(-frames // step) * step
        for lengths, each in (
            (params.text_lengths, text_lengths),
            (params.frame_lengths, frame_lengths),
        ):
            if each is not None:
                lengths.per_item, lengths.is_int64 = each.data_ptr(), each.dtype == torch.int64
        params.durations = durations.data_ptr()
        num_initialised = plan.num_counter_words + plan.num_edge_words
        set_bits = None
        if num_words := num_initialised + plan.num_direction_words:
            workspace = rows.new_empty(num_words, dtype=torch.int32)
            begin = workspace.data_ptr()
            params.block_counter, params.done_counters = begin, begin + _WORD_BYTES
            params.edges = begin + _WORD_BYTES * plan.num_counter_words
            params.directions = begin + _WORD_BYTES * num_initialised
            writes.append(workspace)
            set_bits = workspace[:num_initialised] if num_initialised else None
        kernel = f"align_search_{_SCORE_NAMES[rows.dtype]}{'_aligned' if aligned else ''}"
        self._module.launch(
            f"{kernel}_shared" if plan.shared_directions else kernel,
            params,
            plan.config,
            writes=writes,
            set_bits=set_bits,
        )
        return durations

    def count_lengths(self, mask: Tensor) -> Tensor:
        """Launches the count of a mask's lengths.

        Args:
            mask: [items, tokens, frames] on the GPU: bools, integers or floating-point numbers.

        Returns:
            int32 [2, items]: tokens, then frames.
        """
        items, tokens, frames = mask.shape
        lengths = mask.new_empty((2, items), dtype=torch.int32)
        params = MaskParams(
            mask.data_ptr(),
            *mask.stride(),
            items,
            tokens,
            frames,
            mask.element_size(),
            # The sign of a floating-point number does not make it nonzero.
            2 ** (8 * mask.element_size() - mask.is_floating_point()) - 1,
            lengths.data_ptr(),
        )
        config = LaunchConfig(2 * items, self.info.length_threads)
        self._module.launch("align_count_lengths", params, config, writes=[lengths])
        return lengths

    def path(self, durations: Tensor, frames: int, dtype: torch.dtype) -> Tensor:
        """Launches the expansion of durations to a path.

        Args:
            durations: int32 [items, tokens] on the GPU, contiguous.
            frames: Columns of the path.
            dtype: Its dtype.

        Returns:
            Zeros and ones [items, tokens, frames].

        Raises:
            NotImplementedError: The dtype is complex.
            ValueError: The durations have another dtype or shape.
        """
        if durations.dim() != 2 or durations.dtype != torch.int32:
            raise ValueError(
                f"Durations must be int32 [items, tokens], found {durations.dtype} "
                f"{list(durations.shape)}."
            )
        if dtype.is_complex:
            raise NotImplementedError(f"A path on a GPU cannot be {dtype}; choose a real dtype.")
        items, tokens = durations.shape
        path = durations.new_empty((items, tokens, frames), dtype=dtype)
        if path.numel() == 0:
            return path
        size = path.element_size()
        params = PathParams(
            durations.data_ptr(), items, tokens, frames, path.data_ptr(), size, _one_bits(dtype)
        )
        config = LaunchConfig(
            items * -(-tokens // self.info.path_rows),
            self.info.path_threads,
            overlap_previous=self._gpu.overlap,
        )
        self._module.launch(f"align_path_{size}", params, config, writes=[path])
        return path


def _check_search(
    scores: Tensor,
    text_lengths: Tensor | None,
    frame_lengths: Tensor | None,
    mask: Tensor | None,
) -> None:
    if scores.dim() != 3 or scores.dtype not in _SCORE_NAMES:
        raise ValueError(
            "Scores must be float32, bfloat16 or float16 [items, tokens, frames], found "
            f"{scores.dtype} {list(scores.shape)}."
        )
    for lengths in (text_lengths, frame_lengths):
        if lengths is not None and (
            lengths.shape != scores.shape[:1] or lengths.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(
                f"Lengths must be int32 or int64 [{scores.shape[0]}], found {lengths.dtype} "
                f"{list(lengths.shape)}."
            )
    if mask is not None and (
        mask.shape != scores.shape or mask.device != scores.device or mask.is_complex()
    ):
        raise ValueError(
            f"A mask must be {list(scores.shape)} on {scores.device} and not complex, found "
            f"{mask.dtype} {list(mask.shape)} on {mask.device}."
        )


def _readable(scores: Tensor) -> tuple[Tensor, int]:
    """Scores as the kernel reads them, copied if necessary, and the alignment of their rows.

    Frames are adjacent, rows do not overlap, and each begins at a multiple of four bytes.
    """
    is_apart = scores.shape[1] == 1 or scores.stride(1) >= scores.shape[2]
    rows = scores if scores.stride(2) == 1 and is_apart else scores.contiguous()
    if (alignment := _row_alignment(rows)) >= _COPY_BYTES:
        return rows, alignment
    rows = rows.float().contiguous()
    return rows, _row_alignment(rows)


def _row_alignment(rows: Tensor) -> int:
    """The largest power of two of which the address of every row is a multiple."""
    (items, tokens, _), (item_stride, row_stride, _) = rows.shape, rows.stride()
    steps = (item_stride if items > 1 else 0) | (row_stride if tokens > 1 else 0)
    bits = rows.data_ptr() | steps * rows.element_size()
    return bits & -bits


@cache
def _one_bits(dtype: torch.dtype) -> int:
    """The bits of an element that is 1."""
    return int.from_bytes(bytes(torch.tensor([1.0]).to(dtype).view(torch.uint8).tolist()), "little")
