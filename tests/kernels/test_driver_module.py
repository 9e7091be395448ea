"""The launches of `DriverModule`, as calls of a driver that only records them."""

import ctypes
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megakernel_common.kernels.module import KernelModule, LaunchConfig
from megakernel_tts.kernels.structs import NetworkSampling, PrefillBatch

STREAM, CONTEXT, FUNCTION = 0xBEEF, 0x77, 0x99


class RecordingDriver:
    """Stands for `cuda.bindings.driver`; every call succeeds unless `error` is set."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="overlap"
    )

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = 0

    def CUlaunchConfig(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace()

    def CUlaunchAttribute(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(value=SimpleNamespace())

    def cuGetErrorString(self, error: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"too many blocks"

    def cuModuleGetGlobal(self, module: int, name: bytes) -> tuple[int, int, int]:  # noqa: N802
        return 0, 0xABC0, ctypes.sizeof(NetworkSampling)

    def cuMemcpyDtoH(self, host: int, device: int, size: int) -> tuple[int]:  # noqa: N802
        assert (device, size) == (0xABC0, ctypes.sizeof(NetworkSampling))
        NetworkSampling.from_address(host).top_k = 50
        return (0,)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[int, int]:
            if name.startswith("cuLaunch"):
                at = 2 if name == "cuLaunchKernelEx" else 9
                assert _first_value(arguments[at]) == 1234
                arguments = arguments[:at]
            self.calls.append((name, *arguments))
            values = {"cuModuleGetFunction": FUNCTION, "cuDevicePrimaryCtxRetain": CONTEXT}
            return self.error if name.startswith("cuLaunch") else 0, values.get(name, 1)

        return call


def _first_value(parameters: int) -> int:
    """The first int of the argument, by the address of the array of arguments."""
    argument = ctypes.c_void_p.from_address(parameters).value
    assert argument is not None
    return ctypes.c_int.from_address(argument).value


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    recording, bindings = RecordingDriver(), ModuleType("cuda.bindings")
    monkeypatch.setattr(bindings, "driver", recording, raising=False)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.delitem(sys.modules, "megakernel_common.kernels.driver_module", raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    return recording


@pytest.fixture
def module(driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> KernelModule:
    source = importlib.import_module("megakernel_common.kernels.driver_module")
    monkeypatch.delitem(sys.modules, "megakernel_common.kernels.driver_module")
    made = source.DriverModule(b"cubin", ("kernel",), torch.device("cuda", 2))
    assert ("cuDeviceGet", 2) in driver.calls
    driver.calls.clear()
    return made


def launch(module: KernelModule, config: LaunchConfig, *, set_bits: bool = False) -> torch.Tensor:
    workspace = torch.zeros(7, dtype=torch.int32)
    params = PrefillBatch(num_columns=1234)
    cleared = workspace if set_bits else None
    module.launch("kernel", params, config, writes=[workspace], set_bits=cleared)
    return workspace


def test_a_cooperative_launch_follows_the_clearing_of_the_workspace(
    module: KernelModule, driver: RecordingDriver
) -> None:
    workspace = launch(module, LaunchConfig(132, 384, 200_000, cooperative=True), set_bits=True)
    assert driver.calls == [
        ("cuCtxPushCurrent", CONTEXT),
        ("cuFuncSetAttribute", FUNCTION, "shared", 200_000),
        ("cuMemsetD32Async", workspace.data_ptr(), 0xFFFFFFFF, 7, STREAM),
        ("cuLaunchCooperativeKernel", FUNCTION, 132, 1, 1, 384, 1, 1, 200_000, STREAM),
        ("cuCtxPopCurrent",),
    ]


def test_shared_memory_is_raised_when_a_launch_needs_more(
    module: KernelModule, driver: RecordingDriver
) -> None:
    for shared_bytes in (1_000, 100_000, 60_000, 200_000):
        launch(module, LaunchConfig(1, 32, shared_bytes))
    raised = [call[-1] for call in driver.calls if call[0] == "cuFuncSetAttribute"]
    assert raised == [100_000, 200_000]
    assert [call[0] for call in driver.calls].count("cuLaunchKernel") == 4


def test_a_launch_may_overlap_the_one_before_it(
    module: KernelModule, driver: RecordingDriver
) -> None:
    launch(module, LaunchConfig(3, 64, 100, overlap_previous=True))
    ((config, function),) = [call[1:] for call in driver.calls if call[0] == "cuLaunchKernelEx"]
    assert function == FUNCTION and config.hStream == STREAM
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes) == (3, 64, 100)
    (attribute,) = config.attrs
    assert attribute.id == "overlap" and config.numAttrs == 1
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_a_refused_launch_is_an_error_and_restores_the_context(
    module: KernelModule, driver: RecordingDriver
) -> None:
    driver.error = 720
    with pytest.raises(RuntimeError, match="could not launch kernel with 3 thread blocks: too man"):
        launch(module, LaunchConfig(3, 64))
    assert driver.calls[-1] == ("cuCtxPopCurrent",)


def test_a_global_variable_is_copied(module: KernelModule) -> None:
    assert module.read("facts", NetworkSampling).top_k == 50
