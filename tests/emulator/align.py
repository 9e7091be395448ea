"""The alignment kernels on a CPU: csrc/align compiled with emulated instructions."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from megakernel_common.kernels.declarations import declaration_checks
from megakernel_common.kernels.module import LaunchConfig, Struct
from megakernel_tts.kernels.align import AlignGpu, AlignKernels, make_plan
from megakernel_tts.kernels.align_structs import ALIGN_DECLARATIONS
from tests.emulator.build import load_library

_GPU = AlignGpu(num_sms=2, shared_bytes_per_block=99 << 10, shared_bytes_per_sm=100 << 10,
                overlap=True)  # fmt: skip


class EmulatedAlignModule:
    """A `KernelModule` of the emulated alignment kernels, which run before a launch returns.

    Attributes:
        late: Turns of the other blocks after which block 0 of a search starts.
    """

    def __init__(self) -> None:
        """Compiles the kernels."""
        self.late = 0
        checks = declaration_checks(ALIGN_DECLARATIONS)
        self._library = load_library("emulate_align.cc", checks=checks)

    def read(self, symbol: str, struct: type[Struct]) -> Struct:
        return struct.in_dll(self._library, symbol)

    def launch(
        self,
        kernel: str,
        params: ctypes.Structure,
        config: LaunchConfig,
        *,
        writes: Sequence[Tensor],
        set_bits: Tensor | None = None,
    ) -> None:
        assert writes
        if set_bits is not None:
            set_bits.fill_(-1)
        run = getattr(self._library, kernel)
        run(ctypes.byref(params), config.num_blocks, config.shared_bytes, self.late)


class EmulatedAlign(AlignKernels):
    """The emulated alignment kernels, with a chosen partition of the work."""

    def __init__(self) -> None:
        """Compiles the kernels."""
        self.module = EmulatedAlignModule()
        super().__init__(self.module, _GPU)

    def durations(
        self,
        scores: Tensor,
        text_lengths: Tensor | None = None,
        frame_lengths: Tensor | None = None,
        *,
        aligned: bool = False,
        strips_per_block: int = 2,
        num_score_stages: int = 1,
        late: int = 0,
    ) -> Tensor:
        """Computes durations int32 [B, T] of scores [B, T, S] whose frames are adjacent.

        Args:
            scores: float32, bfloat16 or float16.
            text_lengths: int32 or int64 [B], or none.
            frame_lengths: int32 or int64 [B], or none.
            aligned: Whether four cells are copied at a time.
            strips_per_block: Strips of a block, at most 2.
            num_score_stages: Tiles of scores of a strip in shared memory.
            late: Turns of the other blocks after which the first block starts.
        """
        items, rows, columns = scores.shape
        plan = make_plan(
            self.info,
            _GPU,
            (items, rows, columns),
            self.tile_bytes(scores.dtype),
            max_strips_per_block=strips_per_block,
            num_score_stages=num_score_stages,
        )
        self.module.late = late
        return self.launch_search(scores, text_lengths, frame_lengths, plan, aligned=aligned)
