"""The transducer's kernels on a host without a GPU."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from megakernel_common.kernels.declarations import DeviceStruct, declaration_checks
from megakernel_common.kernels.module import LaunchConfig, Struct
from megakernel_stt.kernels.transducer import KernelTransducer, transducer_program
from megakernel_stt.kernels.transducer_structs import TRANSDUCER_DECLARATIONS
from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.weights import TransducerWeights
from tests.emulator.build import load_library


class EmulatedTransducerModule:
    """A `KernelModule` of emulated kernels, which runs them at once.

    Attributes:
        late: Turns of the other thread blocks after which block 0 begins.
        schedule_seed: 0 runs the threads round robin; other seeds pause thread blocks and warps at
            random times.
        num_launches: Launches so far.
    """

    def __init__(self, hidden_size: int) -> None:
        """Compiles the kernels."""
        self.late = self.schedule_seed = self.num_launches = 0
        macros = [
            f"-D{name}={value}" for name, value in transducer_program(hidden_size).definitions
        ]
        checks = declaration_checks(TRANSDUCER_DECLARATIONS)
        self._library = load_library("emulate_transducer.cc", *macros, checks=checks)

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
        assert config.cooperative and set_bits is not None
        self.num_launches += 1
        for tensor in writes:
            if not any(tensor is state for state in writes[1:6]):
                tensor.view(torch.uint8).fill_(0xFF)  # as arbitrary as memory of a GPU
        set_bits.fill_(-1)
        self._library.set_schedule_seed(self.schedule_seed)
        getattr(self._library, kernel)(ctypes.byref(params), config.num_blocks, self.late)


def emulated_transducer(
    weights: TransducerWeights, config: TransducerConfig, num_blocks: int = 3
) -> KernelTransducer:
    """The emulated decoder of a model.

    Args:
        weights: float32 or bfloat16 tensors.
        config: Its sizes.
        num_blocks: Thread blocks of a launch.
    """
    module = EmulatedTransducerModule(config.hidden_size)
    return KernelTransducer(weights, config, module, num_blocks)
