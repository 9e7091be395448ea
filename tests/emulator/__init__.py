"""The decode kernels on a host without a GPU: csrc compiled with emulated instructions."""

import ctypes
from collections.abc import Collection, Sequence
from ctypes import c_float, c_int, c_void_p

from torch import Tensor

from megakernel_common.kernels.declarations import DeviceStruct, declaration_checks
from megakernel_common.kernels.module import LaunchConfig, Struct
from megakernel_tts.kernels.decode import (
    ORDINARY,
    DecodeKernels,
    DecodeVariant,
    GpuProperties,
    decode_program,
)
from megakernel_tts.kernels.structs import DECODE_DECLARATIONS
from megakernel_tts.model.config import ModelConfig
from tests.emulator.build import load_library

MAX_STREAMS, MAX_PREFILL_COLUMNS = 8, 16  # of the ordinary build
_L2_BYTES = 1_024_000  # room for 200 positions of a talker layer with two key-value heads


class EmulatedModule:
    """A `KernelModule` of emulated kernels, which runs them at once.

    Attributes:
        late: Turns of the other thread blocks after which block 0 begins.
        schedule_seed: 0 runs the threads round robin; other seeds pause thread blocks and warps at
            random times.
        launched: Names of the kernels in the order of their launches.
    """

    def __init__(
        self,
        config: ModelConfig,
        variant: DecodeVariant = ORDINARY,
        *options: str,
        num_streams: int = 0,
        kernels: Collection[str] = (),
    ) -> None:
        """Compiles the kernels.

        Args:
            config: The model's numbers.
            variant: The build.
            options: For the compiler, in addition to those of every emulator.
            num_streams: Streams of the wide kernel; 0 for the kernels of few streams.
            kernels: Names of the kernels that are launched, if not all: each takes a second or two
                to compile.
        """
        self.late = self.schedule_seed = 0
        self.launched: list[str] = []
        program = decode_program(config, variant, num_streams)
        self._kernels = kernels or program.kernels
        names = ",".join(f'"{name}"' for name in self._kernels)
        definitions = [*program.definitions, ("MEGAKERNEL_EMULATED_KERNELS", names)]
        macros = [f"-D{name}={value}" for name, value in definitions]
        self._library = load_library(
            "emulate.cc", *macros, *options, checks=declaration_checks(DECODE_DECLARATIONS)
        )

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
        assert kernel in self._kernels, f"{kernel} was not compiled"
        self.launched.append(kernel)
        if set_bits is not None:
            set_bits.fill_(-1)
        self._library.set_schedule_seed(self.schedule_seed)
        run = getattr(self._library, kernel)
        run(ctypes.byref(params), config.num_blocks, self.late)

    def epoch_violations(self) -> int:
        """Polls so far that found a value of another use than the last or the current one."""
        return self._library.epoch_violations()

    def divided(self, numbers: Tensor, divisor: float) -> Tensor:
        """Float32 numbers by a divisor, as sampling divides scores by a temperature."""
        quotients = numbers.clone()
        self._library.divide(c_void_p(quotients.data_ptr()), c_int(len(numbers)), c_float(divisor))
        return quotients


def emulated_kernels(module: EmulatedModule, num_blocks: int = 3) -> DecodeKernels:
    """Emulated kernels on a grid of some thread blocks.

    Args:
        module: The kernels.
        num_blocks: Thread blocks of a launch.
    """
    return DecodeKernels(module, GpuProperties(num_blocks, _L2_BYTES))
