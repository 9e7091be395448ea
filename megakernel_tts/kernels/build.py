"""Builds the CUDA kernels with nvcc through torch's cpp_extension.

A build is cached in torch's extension folder; its name is a digest of the sources, the flags,
torch's version and the architecture.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def _find_sources() -> Path:
    """The CUDA sources: package data if installed, beside the package in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


CSRC = _find_sources()
KERNELS = ("decode/kernels.cu", "codec/decode.cu", "align/mas.cu")
OPERATORS = (
    "decode/ops.cpp",
    "codec/codec_ops.cpp",
    "align/mas_ops.cpp",
)  # objects lie side by side: no two of one name
# Shared memory that a block may have, in KiB. Those with an "a" let warps move registers.
ARCHITECTURES = {"80": 163, "86": 99, "89": 99, "90a": 227, "100a": 227, "120a": 99}
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores")
# Without contraction, or kernels compiled for one column and for many would round differently.
FLAGS = ("-O3", "-std=c++20", "-fmad=false", "-Werror", "all-warnings")


def obstacle(device: "torch.device") -> str | None:
    """Why the kernel cannot be built for a GPU, if it cannot."""
    import torch
    from torch.utils import cpp_extension

    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"The kernel needs compute capability 8.0, and {device} has {major}.{minor}."
    if cpp_extension.CUDA_HOME is None:
        return (
            "The kernel is built on first use, and there is no nvcc: install the CUDA toolkit "
            f"{torch.version.cuda}, or set CUDA_HOME."
        )
    return None


def load(device: "torch.device", *, profile: bool = False, precise: bool = False) -> None:
    """Builds the kernel for a GPU if need be, and registers its operators.

    Args:
        device: The GPU.
        profile: With a stopwatch for every phase, for a process that only measures.
        precise: With activations, keys and values that are nearly float32, for a process that
            compares codes with plain torch's.

    Raises:
        RuntimeError: There is no nvcc, the GPU is too old, or the compiler failed.
    """
    import torch
    from torch.utils import cpp_extension

    if reason := obstacle(device):
        raise RuntimeError(f"{reason} Or use dtype='float32' for plain torch.")
    if shutil.which("ninja") is None:  # torch asks the shell, which does not look where pip put it
        import ninja

        os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}"
    architecture = architecture_of(device)
    extra = ["-DMEGAKERNEL_PROFILE"] * profile + ["-DMEGAKERNEL_PRECISE"] * precise
    name = f"megakernel_tts_{_digest(torch.__version__, architecture, *extra)}"
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    if not (folder / f"{name}.so").exists():
        print("Building the CUDA kernel for this GPU, once: about a minute.", file=sys.stderr)
    cpp_extension.load(
        name,
        [str(CSRC / source) for source in (*KERNELS, *OPERATORS)],
        extra_cflags=["-O2", "-std=c++20", *extra, *_macros(architecture)],
        extra_cuda_cflags=[*FLAGS, *extra, *_target(architecture)],
        is_python_module=False,
    )


def architecture_of(device: "torch.device") -> str:
    """What nvcc calls a GPU's architecture."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def nvcc(architecture: str) -> list[str]:
    """How to compile our sources for an architecture.

    Raises:
        RuntimeError: There is no nvcc.
    """
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise RuntimeError("There is no nvcc: install the CUDA toolkit.")
    return [compiler, *FLAGS, *_target(architecture)]


def _digest(*parts: str) -> str:
    digest = hashlib.sha256(" ".join((*parts, *FLAGS)).encode())
    for file in sorted(CSRC.rglob("*.c*")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _macros(architecture: str) -> list[str]:
    """What the sources must know of a GPU; an unknown one has the least of shared memory."""
    macros = [f"-DMEGAKERNEL_SHARED_KB={ARCHITECTURES.get(architecture, 99)}"]
    if architecture.endswith("a"):
        macros.append("-DMEGAKERNEL_MOVES_REGISTERS")
    return macros


def _target(architecture: str) -> list[str]:
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    return [code, *_macros(architecture)]


def check() -> bool:
    """Compiles the kernels for every architecture; prints registers, spills and shared memory.

    Returns:
        Whether all went well, and nothing is spilled.

    Raises:
        RuntimeError: There is no nvcc.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:

        def compile_for(
            architecture: str, source: str
        ) -> tuple[str, str, subprocess.CompletedProcess[str]]:
            command = [*nvcc(architecture), "-cubin", "-Xptxas", "-v"]
            command += ["-o", f"{folder}/{architecture}-{Path(source).stem}.cubin"]
            run = subprocess.run([*command, str(CSRC / source)], capture_output=True, text=True)
            return architecture, source, run

        fine = True
        jobs = [(a, source) for source in KERNELS for a in ARCHITECTURES]
        for architecture, source, run in pool.map(compile_for, *zip(*jobs, strict=True)):
            used = [int(count) for count in _USED.findall(run.stderr)]
            spilled = [int(count) for count in _SPILLED.findall(run.stderr)]
            print(
                f"sm_{architecture} {source}: {len(used)} kernels, at most "
                f"{max(used, default=0)} registers and {max(spilled, default=0)} bytes spilled, "
                f"at most {ARCHITECTURES[architecture]} KiB of shared memory"
            )
            if run.returncode:
                print(run.stderr, file=sys.stderr)
                fine = False
            fine &= not any(spilled)
    return fine
