"""The codec's kernels: their program, launches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megakernel_common.kernels.loader import LaunchPath, load_module
from megakernel_common.kernels.module import KernelModule, LaunchConfig
from megakernel_common.kernels.program import Program
from megakernel_tts.kernels.codec_structs import (
    ATTENTION_WARPS,
    BLOCK_THREADS,
    CODEC_DECLARATIONS,
    MAX_HISTORIES,
    SAMPLE_BLOCK_ROWS,
    SAMPLE_THREADS,
    AttentionParams,
    DepthwiseParams,
    EmbedParams,
    ProjectionParams,
    ResidualUnitParams,
    SamplesParams,
    StateUpdateParams,
)
from megakernel_tts.kernels.codec_tiles import (
    MANY_ROW_TILES,
    TILES,
    AnyTile,
    ChooseTile,
    ChooseTiling,
    choose_tile,
    choose_tiling,
)
from megakernel_tts.kernels.codec_unit_tiles import (
    RESIDUAL_UNIT_TILES,
    ChooseUnitTile,
    ResidualUnitTile,
    choose_unit_tile,
)
from megakernel_tts.kernels.codec_warpgroup_tiles import WARPGROUP_TILES, WarpgroupTile

if TYPE_CHECKING:
    import torch
    from torch import Tensor


HEAD_DIMS = (16, 32, 64)  # of the attention kernels
_OVERLAP_CAPABILITY = 9  # compute capability with programmatic dependent launch
_WARPGROUP_CAPABILITY = 9  # the only one with warpgroup instructions


def codec_program() -> Program:
    """The program of the codec's kernels."""
    tiles = " ".join(
        f"X({tile.row_groups}, {tile.column_groups}, {tile.k_splits}, {tile.planes}, "
        f"{tile.blocks_per_sm}, {tile.shared_bytes})"
        for tile in TILES
    )
    many_row_tiles = " ".join(
        f"X({tile.row_groups}, {tile.column_groups}, {tile.row_warps}, {tile.planes}, "
        f"{tile.blocks_per_sm}, {tile.shared_bytes})"
        for tile in MANY_ROW_TILES
    )
    warpgroup_tiles = " ".join(
        f"X({tile.kernel}, {tile.shared_bytes}, {tile.template_arguments})"
        for tile in WARPGROUP_TILES
    )
    unit_tiles = " ".join(
        f"X({tile.kernel}, {tile.shared_bytes}, {tile.template_arguments})"
        for tile in RESIDUAL_UNIT_TILES
    )
    kernels = (
        *(tile.kernel for tile in (*TILES, *MANY_ROW_TILES, *WARPGROUP_TILES)),
        *(tile.kernel for tile in RESIDUAL_UNIT_TILES),
        *(f"codec_attention_{head_dim}" for head_dim in HEAD_DIMS),
        "codec_embed",
        "codec_depthwise",
        "codec_samples",
        "codec_update_state",
    )
    head_dims = " ".join(f"X({head_dim})" for head_dim in HEAD_DIMS)
    definitions = (
        ("MEGAKERNEL_CODEC_TILES(X)", tiles),
        ("MEGAKERNEL_CODEC_MANY_ROW_TILES(X)", many_row_tiles),
        ("MEGAKERNEL_CODEC_WARPGROUP_TILES(X)", warpgroup_tiles),
        ("MEGAKERNEL_CODEC_RESIDUAL_UNIT_TILES(X)", unit_tiles),
        ("MEGAKERNEL_CODEC_HEAD_DIMS(X)", head_dims),
    )
    return Program("codec", "codec/kernels.cu", kernels, CODEC_DECLARATIONS, definitions)


def load_codec_kernels(
    device: "torch.device",
    path: LaunchPath | None = None,
    choose: ChooseTile = choose_tile,
    choose_unit: ChooseUnitTile = choose_unit_tile,
    choose_tiling: ChooseTiling = choose_tiling,
) -> "CodecKernels":
    """Compiles the codec's kernels unless they are cached, and loads them.

    Args:
        device: The GPU.
        path: How to compile and launch; by default what `support` finds. For tests.
        choose: As in `CodecKernels`.
        choose_unit: As in `CodecKernels`.
        choose_tiling: As in `CodecKernels`.

    Raises:
        RuntimeError: The kernels cannot be compiled on this machine.
    """
    import torch

    properties = torch.cuda.get_device_properties(device)
    return CodecKernels(
        load_module(codec_program(), device, path),
        properties.multi_processor_count,
        overlap=properties.major >= _OVERLAP_CAPABILITY,
        has_warpgroups=properties.major == _WARPGROUP_CAPABILITY,
        choose=choose,
        choose_unit=choose_unit,
        choose_tiling=choose_tiling,
    )


class CodecKernels:
    """Launches the codec's kernels on one GPU, on torch's current stream; does not wait.

    `writes` are the tensors that a kernel writes.

    Attributes:
        has_warpgroups: Whether the GPU has the instructions of `WARPGROUP_TILES`.
    """

    def __init__(
        self,
        module: KernelModule,
        num_sms: int,
        *,
        overlap: bool,
        has_warpgroups: bool,
        choose: ChooseTile = choose_tile,
        choose_unit: ChooseUnitTile = choose_unit_tile,
        choose_tiling: ChooseTiling = choose_tiling,
    ) -> None:
        """Stores the module.

        Args:
            module: The compiled kernels.
            num_sms: Multiprocessors of the GPU.
            overlap: Whether the GPU can start a kernel while the previous one ends.
            has_warpgroups: Whether the GPU has the instructions of `WARPGROUP_TILES`.
            choose: The tile of a launch on that many multiprocessors. No tile changes a bit of the
                samples; tests and benchmarks compare them.
            choose_unit: The same for a residual unit as one launch; None for two launches.
            choose_tiling: Whether the input of a projection is tiled, where it can be.
        """
        self._module, self._num_sms, self._overlap = module, num_sms, overlap
        self._choose, self._choose_unit = choose, choose_unit
        self._choose_tiling = choose_tiling
        self.has_warpgroups = has_warpgroups

    def embed(self, params: EmbedParams, writes: "Sequence[Tensor]") -> None:
        """Launches the embedding: one block per frame."""
        config = LaunchConfig(params.num_frames, BLOCK_THREADS)
        self._module.launch("codec_embed", params, config, writes=writes)

    def tile(self, params: ProjectionParams) -> AnyTile:
        """The tile of a projection."""
        return self._choose(params, self._num_sms)

    def is_tiled(self, params: ProjectionParams) -> bool:
        """Whether the input of a projection is tiled, where it can be."""
        return self._choose_tiling(params, self._num_sms)

    def project(
        self,
        params: ProjectionParams,
        tile: AnyTile,
        writes: "Sequence[Tensor]",
        *,
        overlap_previous: bool = True,
    ) -> None:
        """Launches a projection.

        Args:
            params: The argument.
            tile: The tile, which must fit it.
            writes: Tensors that the kernel writes.
            overlap_previous: Whether the kernel may start before the previous one ends: `frames`
                must be complete then.
        """
        if isinstance(tile, WarpgroupTile):
            num_blocks = tile.num_blocks(params, self._num_sms)
        else:
            num_blocks = tile.num_blocks(params)
        config = LaunchConfig(
            num_blocks,
            tile.threads,
            tile.shared_bytes,
            overlap_previous=overlap_previous and self._overlap,
        )
        self._module.launch(tile.kernel, params, config, writes=writes)

    def unit_tile(self, params: ResidualUnitParams) -> ResidualUnitTile | None:
        """The tile of a residual unit as one launch; None if it should be two launches."""
        return self._choose_unit(params, self._num_sms)

    def residual_unit(
        self, params: ResidualUnitParams, tile: ResidualUnitTile, writes: "Sequence[Tensor]"
    ) -> None:
        """Launches a residual unit; its tile must fit it."""
        config = LaunchConfig(
            min(tile.num_items(params.convolution.num_rows), self._num_sms),
            tile.threads,
            tile.shared_bytes,
            overlap_previous=self._overlap,
        )
        self._module.launch(tile.kernel, params, config, writes=writes)

    def attend(self, params: AttentionParams, writes: "Sequence[Tensor]") -> None:
        """Launches attention: one block per frame and head."""
        config = LaunchConfig(
            params.num_frames * params.num_heads,
            32 * ATTENTION_WARPS,
            overlap_previous=self._overlap,
        )
        kernel = f"codec_attention_{params.head_dim}"
        self._module.launch(kernel, params, config, writes=writes)

    def depthwise(self, params: DepthwiseParams, writes: "Sequence[Tensor]") -> None:
        """Launches the depthwise convolution: one block per row."""
        config = LaunchConfig(params.num_rows, BLOCK_THREADS, overlap_previous=self._overlap)
        self._module.launch("codec_depthwise", params, config, writes=writes)

    def samples(self, params: SamplesParams, writes: "Sequence[Tensor]") -> None:
        """Launches the last convolution: one block for `SAMPLE_BLOCK_ROWS` rows.

        Args:
            params: The argument.
            writes: First the input, which names the device, then the tensors on the host that the
                kernel writes.
        """
        num_blocks = -(-params.num_rows // SAMPLE_BLOCK_ROWS)
        config = LaunchConfig(num_blocks, SAMPLE_THREADS, overlap_previous=self._overlap)
        self._module.launch("codec_samples", params, config, writes=writes)

    def update_state(self, params: StateUpdateParams, writes: "Sequence[Tensor]") -> None:
        """Launches the update of the histories: one block per frame and layer."""
        assert params.num_layers <= MAX_HISTORIES
        config = LaunchConfig(params.num_frames * params.num_layers, BLOCK_THREADS)
        self._module.launch("codec_update_state", params, config, writes=writes)
