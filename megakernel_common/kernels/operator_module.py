"""Launches kernels through the torch operators of csrc/launcher.cpp."""

import ctypes
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from megakernel_common.kernels.declarations import DeviceStruct
from megakernel_common.kernels.module import DEFAULT_SHARED_BYTES, LaunchConfig, Struct


class OperatorModule:
    """A `KernelModule` of torch operators, which must be loaded: see `build.load_launcher`."""

    def __init__(self, cubin: bytes, kernels: Sequence[str], device: torch.device) -> None:
        """Loads a cubin.

        Args:
            cubin: The compiled program.
            kernels: Names of its kernels.
            device: The GPU.

        Raises:
            RuntimeError: CUDA refused the cubin, or it lacks a kernel.
        """
        self._ops, self._device_index = torch.ops.megakernel_tts, device.index or 0
        image = torch.frombuffer(bytearray(cubin), dtype=torch.uint8)
        status, self._context, self._module = self._ops.load_module(image, self._device_index)
        self._check(status, "load the kernels")
        self._kernels = {name: self._find(name) for name in kernels}
        self._shared_bytes = dict.fromkeys(kernels, DEFAULT_SHARED_BYTES)
        self._status = _Status()

    def _find(self, name: str) -> int:
        status, kernel = self._ops.find_kernel(self._context, self._module, name)
        self._check(status, f"find {name}")
        return kernel

    def _check(self, status: int, action: str) -> None:
        if status:
            raise RuntimeError(f"CUDA could not {action}: {self._ops.error_text(status)}.")

    def read(self, symbol: str, struct: type[Struct]) -> Struct:
        """Returns a copy of a global variable; see `KernelModule.read`."""
        value = struct()
        data = torch.frombuffer(value, dtype=torch.uint8)
        status = self._ops.read_symbol(self._context, self._module, symbol, data)
        self._check(status, f"read {symbol}")
        return value

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
        if status := self._status.value:
            self._check(status, f"launch {kernel} with {config.num_blocks} thread blocks")

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
            status = self._ops.allow_shared_bytes(
                self._context, self._kernels[kernel], config.shared_bytes
            )
            self._check(status, f"give {kernel} {config.shared_bytes} bytes of shared memory")
            self._shared_bytes[kernel] = config.shared_bytes
        # torch.cuda.current_stream would make an object for every launch.
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        return (
            self._context,
            self._kernels[kernel],
            stream,
            config.num_blocks,
            config.num_threads,
            config.shared_bytes,
            config.cooperative,
            config.overlap_previous,
            ctypes.addressof(params),
            writes,
            set_bits,
            self._status.tensor,
        )


class _Status(threading.local):
    """The status of a thread's last launch.

    Attributes:
        tensor: int64 [1], written by the operator.
    """

    def __init__(self) -> None:
        self.tensor = torch.zeros(1, dtype=torch.int64)
        self._values = self.tensor.numpy()

    @property
    def value(self) -> int:
        """The driver's status; 0 for success."""
        return int(self._values[0])
