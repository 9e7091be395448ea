"""Chooses how kernels are compiled and launched on a GPU, compiles them and loads them.

Two paths exist. `extension` compiles with nvcc and launches through torch operators, which torch
builds with a C++ compiler. `nvrtc` needs neither: it compiles with NVRTC and launches through
cuda-bindings. Both keep the compiled kernels in the user's cache folder.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megakernel_common.files import replace_file
from megakernel_common.kernels import build, nvrtc
from megakernel_common.kernels.program import Program

if TYPE_CHECKING:
    import torch

    from megakernel_common.kernels.module import KernelModule

LaunchPath = Literal["extension", "nvrtc"]


@dataclass(frozen=True)
class Support:
    """Whether kernels run on a GPU.

    Attributes:
        path: How they are compiled and launched, or None.
        obstacle: Why not, as a sentence; empty if they run.
    """

    path: LaunchPath | None
    obstacle: str = ""


def support(device: "torch.device") -> Support:
    """Finds the path for a GPU: the extension where it can be built, else NVRTC.

    Args:
        device: The GPU.
    """
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return Support(
            None, f"The kernels need compute capability 8.0, and {device} has {major}.{minor}."
        )
    no_extension = build.obstacle()
    if no_extension is None:
        return Support("extension")
    no_nvrtc = nvrtc.obstacle()
    if no_nvrtc is None:
        return Support("nvrtc")
    return Support(
        None,
        f"The kernels cannot be compiled: {no_extension}, and {no_nvrtc}. Install torch's wheel "
        f"for CUDA, or the CUDA toolkit {torch.version.cuda} and a C++ compiler.",
    )


def obstacle(device: "torch.device") -> str | None:
    """Returns why the kernels cannot run on a GPU, as a sentence, or None."""
    return support(device).obstacle or None


def cache_folder() -> Path:
    """The folder of the compiled kernels."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "megakernel-tts" / "kernels"


def load_module(
    program: Program, device: "torch.device", path: LaunchPath | None = None
) -> "KernelModule":
    """Compiles a program unless it is cached, and loads it; once in a process for each GPU.

    Args:
        program: The program.
        device: The GPU.
        path: How to compile and launch; by default what `support` finds. For tests.

    Raises:
        RuntimeError: The kernels cannot be compiled here, or the compiler failed.
    """
    import torch

    if path is None:
        found = support(device)
        if found.path is None:
            raise RuntimeError(f"{found.obstacle} Or use dtype='float32' for plain torch.")
        path = found.path
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load(program, torch.device("cuda", index), path)


@cache
def _load(program: Program, device: "torch.device", path: LaunchPath) -> "KernelModule":
    architecture = build.architecture_of(device)
    compiler = build if path == "extension" else nvrtc
    cubin = compiled(program, architecture, compiler.compiler_id(), compiler.compile_program)
    return open_cubin(cubin, program.kernels, device, path)


def open_cubin(
    cubin: bytes, kernels: tuple[str, ...], device: "torch.device", path: LaunchPath
) -> "KernelModule":
    """Loads a cubin on a GPU.

    Args:
        cubin: The compiled program.
        kernels: Names of its kernels.
        device: The GPU.
        path: How to launch.

    Raises:
        RuntimeError: The launcher cannot be built, or CUDA refused the cubin.
    """
    if path == "extension":
        from megakernel_common.kernels.operator_module import OperatorModule

        build.load_launcher()
        return OperatorModule(cubin, kernels, device)
    from megakernel_common.kernels.driver_module import DriverModule

    return DriverModule(cubin, kernels, device)


def compiled(
    program: Program,
    architecture: str,
    compiler: str,
    compile_program: Callable[[Program, str], bytes],
) -> bytes:
    """The cubin of a program, from the cache or compiled now.

    Args:
        program: The program.
        architecture: As nvcc names it.
        compiler: The compiler's name and version.
        compile_program: Compiles a program for an architecture.

    Raises:
        RuntimeError: The compiler failed.
    """
    folder = cache_folder()
    file = folder / f"{program.name}-sm_{architecture}-{program.digest(architecture, compiler)}"
    file = file.with_suffix(".cubin")
    if file.exists():
        return file.read_bytes()
    print(
        f"Compiling the {program.name} kernels for sm_{architecture}, once: under a minute.",
        file=sys.stderr,
    )
    cubin = compile_program(program, architecture)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(file, cubin)
    return cubin
