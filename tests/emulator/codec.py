"""The codec's kernels on a CPU: csrc/codec compiled with emulated instructions."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from megakernel_common.kernels.declarations import declaration_checks
from megakernel_common.kernels.module import LaunchConfig, Struct
from megakernel_tts.kernels.codec import CodecKernels, codec_program
from megakernel_tts.kernels.codec_structs import CODEC_DECLARATIONS
from megakernel_tts.kernels.codec_tiles import (
    ChooseTile,
    ChooseTiling,
    choose_tile,
    choose_tiling,
)
from megakernel_tts.kernels.codec_unit_tiles import ChooseUnitTile, choose_unit_tile
from tests.emulator.build import load_library
from tests.emulator.prerequisites import PrerequisiteWrites


class EmulatedCodecModule:
    """A `KernelModule` of the codec's emulated kernels, which run before a launch returns."""

    def __init__(self) -> None:
        """Compiles the kernels."""
        macros = [f"-D{name}={value}" for name, value in codec_program().definitions]
        checks = declaration_checks(CODEC_DECLARATIONS)
        self._library = load_library("emulate_codec.cc", *macros, checks=checks)
        self.writes = PrerequisiteWrites(self._library)

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
        assert writes and set_bits is None
        self.writes.before_launch(config, writes)
        getattr(self._library, kernel)(ctypes.byref(params), config.num_blocks)


def emulated_codec_kernels(
    num_sms: int = 4,
    choose: ChooseTile = choose_tile,
    choose_unit: ChooseUnitTile = choose_unit_tile,
    choose_tiling: ChooseTiling = choose_tiling,
) -> CodecKernels:
    """The codec's emulated kernels, with the tiles for a GPU of `num_sms` multiprocessors."""
    return CodecKernels(
        EmulatedCodecModule(),
        num_sms,
        overlap=True,
        has_warpgroups=True,
        choose=choose,
        choose_unit=choose_unit,
        choose_tiling=choose_tiling,
    )
