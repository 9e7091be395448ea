"""Launches kernels through cuda-bindings, on hosts without a C++ compiler."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver  # pyright: ignore
from torch import Tensor

from megakernel_common.kernels.declarations import DeviceStruct
from megakernel_common.kernels.module import DEFAULT_SHARED_BYTES, LaunchConfig, Struct


class DriverModule:
    """A `KernelModule` of the CUDA driver."""

    def __init__(self, cubin: bytes, kernels: Sequence[str], device: torch.device) -> None:
        """Loads a cubin.

        Args:
            cubin: The compiled program.
            kernels: Names of its kernels.
            device: The GPU.
        """
        torch.cuda.init()
        self._device_index = device.index or 0
        handle = _checked(driver.cuDeviceGet(self._device_index), "find the GPU")
        self._context = _checked(driver.cuDevicePrimaryCtxRetain(handle), "get the context")
        self._shared_bytes = dict.fromkeys(kernels, DEFAULT_SHARED_BYTES)
        with self._current():
            self._module = _checked(driver.cuModuleLoadData(cubin), "load the kernels")
            self._functions = {
                name: _checked(
                    driver.cuModuleGetFunction(self._module, name.encode()), f"find {name}"
                )
                for name in kernels
            }

    def _current(self) -> "_Current":
        return _Current(self._context)

    def read(self, symbol: str, struct: type[Struct]) -> Struct:
        """Returns a copy of a global variable; see `KernelModule.read`."""
        value = struct()
        with self._current():
            address, size = _checked(
                driver.cuModuleGetGlobal(self._module, symbol.encode()), f"find {symbol}"
            )
            assert size == ctypes.sizeof(struct), f"{symbol} has {size} bytes"
            _checked(driver.cuMemcpyDtoH(ctypes.addressof(value), address, size), "copy")
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
        # torch.cuda.current_stream would make an object for every launch.
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        function = self._functions[kernel]
        argument = ctypes.c_void_p(ctypes.addressof(params))
        with self._current():
            if config.shared_bytes > self._shared_bytes[kernel]:
                self._allow_shared_bytes(kernel, config.shared_bytes)
            if set_bits is not None:
                _checked(
                    driver.cuMemsetD32Async(
                        set_bits.data_ptr(), 0xFFFFFFFF, set_bits.numel(), stream
                    ),
                    "clear the workspace",
                )
            error = _launch(function, config, stream, ctypes.addressof(argument))
        _checked(error, f"launch {kernel} with {config.num_blocks} thread blocks")

    def _allow_shared_bytes(self, kernel: str, shared_bytes: int) -> None:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(
            driver.cuFuncSetAttribute(self._functions[kernel], attribute, shared_bytes),
            f"give {kernel} {shared_bytes} bytes of shared memory",
        )
        self._shared_bytes[kernel] = shared_bytes


class _Current:
    """Makes a context the thread's current one; threads begin without any."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        _checked(driver.cuCtxPushCurrent(self._context), "use the context")

    def __exit__(self, *_: object) -> None:
        driver.cuCtxPopCurrent()


def _launch(function: Any, config: LaunchConfig, stream: int, arguments: int) -> tuple[Any, ...]:
    """Launches a function; `arguments` is the address of an array of addresses."""
    grid, block, shared = (config.num_blocks, 1, 1), (config.num_threads, 1, 1), config.shared_bytes
    if not config.overlap_previous:
        launch = driver.cuLaunchCooperativeKernel if config.cooperative else _launch_plain
        return launch(function, *grid, *block, shared, stream, arguments)
    extended = driver.CUlaunchConfig()
    extended.gridDimX, extended.gridDimY, extended.gridDimZ = grid
    extended.blockDimX, extended.blockDimY, extended.blockDimZ = block
    extended.sharedMemBytes, extended.hStream = shared, stream
    overlap = driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    extended.attrs, extended.numAttrs = [overlap], 1
    return driver.cuLaunchKernelEx(extended, function, arguments, 0)


def _launch_plain(*arguments: Any) -> tuple[Any, ...]:
    return driver.cuLaunchKernel(*arguments, 0)


def _checked(result: tuple[Any, ...], action: str) -> Any:
    """The values of a call of the driver.

    Raises:
        RuntimeError: The driver returned an error.
    """
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        text = driver.cuGetErrorString(error)[1]
        message = text.decode() if text else error.name
        raise RuntimeError(f"CUDA could not {action}: {message}.")
    return values[0] if len(values) == 1 else values
