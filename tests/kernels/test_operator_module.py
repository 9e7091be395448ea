"""The operators of csrc/launcher.cpp on a driver without a GPU.

The launcher is linked with a C++ runtime of its own, as some compilers do: an exception that left
it would end the process.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megakernel_common.kernels import build

SCRIPT = """
import ctypes
import os
import sys

import torch

from megakernel_common.kernels import build
from megakernel_common.kernels.module import LaunchConfig
from megakernel_common.kernels.operator_module import OperatorModule
from megakernel_common.kernels.declarations import DeviceStruct

def facts(size):
    return type("Facts", (DeviceStruct,), {"_fields_": [("value", ctypes.c_uint8 * size)]})

build.load_launcher()
operator = torch.ops.megakernel_tts.launch.default
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
torch.ops.megakernel_tts.launch = lambda *arguments: operator.redispatch(keys, *arguments)
torch._C._cuda_getCurrentRawStream = lambda index: 5

def use(size):
    module = OperatorModule(b"cubin", ("kernel",), torch.device("cuda", 0))
    assert bytes(module.read("facts", facts(size))) == b"\\7" * 4
    workspace = torch.zeros(8, dtype=torch.int32)
    config = LaunchConfig(3, 64, 100_000, cooperative=True)
    module.launch("kernel", facts(4)(), config, writes=[workspace], set_bits=workspace[:4])

def report(size):
    try:
        use(size)
        print("success:", driver.calls().decode(), flush=True)
    except RuntimeError as error:
        print(error, flush=True)

if os.fork() == 0:
    report(4)
    os._exit(0)
os.wait()
library, *names = sys.argv[1:]
driver = ctypes.CDLL(library)  # the launcher finds it by its name, libcuda.so.1
driver.calls.restype = ctypes.c_char_p
for name in names:
    driver.fail(name.encode())
    report(5 if name == "size" else 4)
"""
FAILURES = {
    "cuInit": "load the kernels",
    "cuDeviceGet": "load the kernels",
    "cuDevicePrimaryCtxRetain": "load the kernels",
    "cuCtxPushCurrent": "load the kernels",
    "cuModuleLoadData": "load the kernels",
    "cuModuleGetFunction": "find kernel",
    "cuModuleGetGlobal": "read facts",
    "cuMemcpyDtoH": "read facts",
    "cuFuncSetAttribute": "give kernel 100000 bytes of shared memory",
    "cuMemsetD32Async": "launch kernel with 3 thread blocks",
    "cuLaunchKernelEx": "launch kernel with 3 thread blocks",
}
CALLS = (
    "cuInit cuDeviceGet cuDevicePrimaryCtxRetain cuCtxPushCurrent cuModuleLoadData cuCtxPopCurrent "
    "cuCtxPushCurrent cuModuleGetFunction cuCtxPopCurrent "
    "cuCtxPushCurrent cuModuleGetGlobal cuMemcpyDtoH cuCtxPopCurrent "
    "cuCtxPushCurrent cuFuncSetAttribute cuCtxPopCurrent "
    "cuCtxPushCurrent cuMemsetD32Async cuLaunchKernelEx cuCtxPopCurrent"
)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a process prints that uses the operators.

    First without a driver, then with one that fails for one cause after the other. The compiler
    links its C++ runtime statically, and does not optimise, to be quick.
    """
    if build.obstacle() or shutil.which("g++") is None:
        pytest.skip(build.obstacle() or "there is no g++")
    if torch.version.cuda is not None:
        pytest.skip("this torch loads the real driver")
    folder = tmp_path_factory.mktemp("driver")
    compiler = folder / "compiler"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0 -static-libstdc++ -static-libgcc\n')
    compiler.chmod(0o755)
    source, library = Path(__file__).with_name("fake_driver.cc"), folder / "driver.so"
    options = [f"-I{build.cuda_headers()}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["g++", "-shared", "-fPIC", *options, source, "-o", library], check=True)
    command = [sys.executable, "-c", SCRIPT, library, *FAILURES, "none", "size"]
    environment = os.environ | {"CXX": str(compiler)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_a_failing_call_of_the_driver_is_an_exception(output: list[str]) -> None:
    """So is a global variable of another size than its struct."""
    messages = [f"CUDA could not {action}: a failing call." for action in FAILURES.values()]
    messages += [f"success: {CALLS} ", "CUDA could not read facts: error 1."]
    assert output[1:] == messages


def test_a_missing_driver_is_an_exception(output: list[str]) -> None:
    assert output[0] == (
        "CUDA could not load the kernels: there is no driver for CUDA 12 or later."
    )
