"""The kernels of Conformer blocks on a host without a GPU."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from megakernel_common.kernels.declarations import DeviceStruct, declaration_checks
from megakernel_common.kernels.module import LaunchConfig, Struct
from megakernel_stt.kernels.conformer import ConformerKernels, conformer_program, sizes_of
from megakernel_stt.kernels.conformer_structs import CONFORMER_DECLARATIONS
from megakernel_stt.model.config import EncoderConfig
from megakernel_stt.model.weights import EncoderWeights
from tests.emulator.build import load_library
from tests.emulator.prerequisites import PrerequisiteWrites


class EmulatedConformerModule:
    """A `KernelModule` of emulated kernels, which run before a launch returns."""

    def __init__(self, config: EncoderConfig) -> None:
        """Compiles the kernels."""
        program = conformer_program(*sizes_of(config))
        macros = [f"-D{name}={value}" for name, value in program.definitions]
        checks = declaration_checks(CONFORMER_DECLARATIONS)
        self._library = load_library("emulate_conformer.cc", *macros, checks=checks)
        self._writes = PrerequisiteWrites(self._library)

    def read(self, symbol: str, struct: type[Struct]) -> Struct:
        return struct.in_dll(self._library, symbol)

    def launch(
        self,
        kernel: str,
        params: DeviceStruct,
        config: LaunchConfig,
        *,
        writes: Sequence[Tensor],
        set_bits: Tensor | None = None,
    ) -> None:
        assert writes and set_bits is None
        self._writes.before_launch(config, writes)
        run = getattr(self._library, kernel)
        run(ctypes.byref(params), config.num_blocks, config.shared_bytes)


def emulated_conformer(weights: EncoderWeights, config: EncoderConfig) -> ConformerKernels:
    """The emulated kernels of an encoder.

    Args:
        weights: float32 or bfloat16 tensors.
        config: Its sizes.
    """
    return ConformerKernels(weights, config, EmulatedConformerModule(config), overlap=True)
