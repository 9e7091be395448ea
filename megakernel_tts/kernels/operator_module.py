"""Launches kernels through the torch operators of csrc/launcher.cpp."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernel_tts.kernels.module import DEFAULT_SHARED_BYTES, LaunchConfig, Struct
from megakernel_tts.kernels.structs import DeviceStruct


class OperatorModule:
    """A `KernelModule` of torch operators, which must be loaded: see `build.load_launcher`."""

    def __init__(self, cubin: bytes, kernels: Sequence[str], device: torch.device) -> None:
        """Loads a cubin.

        Args:
            cubin: The compiled program.
            kernels: Names of its kernels.
            device: The GPU.
        """
        self._ops = torch.ops.megakernel_tts
        self._device = device.index or 0
        image = torch.frombuffer(bytearray(cubin), dtype=torch.uint8)
        self._module: int = self._ops.load_module(image, self._device)
        self._kernels: dict[str, int] = {
            name: self._ops.find_kernel(self._module, name, self._device) for name in kernels
        }
        self._shared_bytes = dict.fromkeys(kernels, DEFAULT_SHARED_BYTES)

    def read(self, symbol: str, struct: type[Struct]) -> Struct:
        """Returns a copy of a global variable; see `KernelModule.read`."""
        data = self._ops.read_symbol(self._module, symbol, self._device)
        return struct.from_buffer_copy(data.numpy())

    def launch(
        self,
        kernel: str,
        params: DeviceStruct,
        config: LaunchConfig,
        *,
        writes: Sequence[Tensor],
        set_bits: Tensor | None = None,
    ) -> None:
        """Launches a kernel; see `KernelModule.launch`."""
        self._ops.launch(*self.arguments(kernel, params, config, writes, set_bits))

    def arguments(
        self,
        kernel: str,
        params: DeviceStruct,
        config: LaunchConfig,
        writes: Sequence[Tensor],
        set_bits: Tensor | None,
    ) -> tuple[object, ...]:
        """The arguments of the operator `launch`."""
        if config.shared_bytes > self._shared_bytes[kernel]:
            self._ops.allow_shared_bytes(self._kernels[kernel], config.shared_bytes, self._device)
            self._shared_bytes[kernel] = config.shared_bytes
        return (
            self._kernels[kernel],
            self._device,
            config.num_blocks,
            config.num_threads,
            config.shared_bytes,
            config.cooperative,
            config.overlap_previous,
            torch.frombuffer(params, dtype=torch.uint8),
            writes,
            set_bits,
        )
