"""The extension path: compiles kernels with nvcc, and the launcher with torch's cpp_extension."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel_common.kernels.program import (
    COMMON_FLAGS,
    CSRC,
    Program,
    architecture_flags,
)

if TYPE_CHECKING:
    import torch

FLAGS = ("-O3", *COMMON_FLAGS, "-Werror", "all-warnings")
_LAUNCHER = "launcher.cpp"
_HOST_FLAGS = ("-O2", "-std=c++20")
_HEADERS = re.compile(r'INCLUDES="-I([^"]+)"')


def find_nvcc() -> str | None:
    """The path of nvcc: on the PATH, or in the toolkit that torch finds."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    return shutil.which("nvcc") or (shutil.which("nvcc", path=f"{home}/bin") if home else None)


def obstacle() -> str | None:
    """Returns why the extension cannot be built, or None."""
    if find_nvcc() is None:
        return "there is no nvcc"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "there is no C++ compiler"
    return None


def architecture_of(device: "torch.device") -> str:
    """Returns a GPU's architecture as nvcc names it, such as `90a`."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def nvcc(architecture: str) -> list[str]:
    """The command that compiles sources of csrc for an architecture.

    Args:
        architecture: As nvcc names it, such as `90a`.

    Raises:
        RuntimeError: There is no nvcc.
    """
    compiler = find_nvcc()
    if compiler is None:
        raise RuntimeError("There is no nvcc: install the CUDA toolkit.")
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    return [compiler, *FLAGS, code, *architecture_flags(architecture)]


@cache
def compiler_id() -> str:
    """The version of nvcc and its flags."""
    command = [*nvcc("90a")[:1], "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"{version} {FLAGS}"


def compile_program(program: Program, architecture: str) -> bytes:
    """Compiles a program with nvcc.

    Args:
        program: The program.
        architecture: As nvcc names it.

    Returns:
        The cubin.

    Raises:
        RuntimeError: There is no nvcc, or the text does not compile; the message has its output.
    """
    return _compile(program, architecture)[0]


def report_usage(program: Program, architecture: str) -> str:
    """Compiles a program; returns what ptxas prints of registers and spills.

    Args:
        program: The program.
        architecture: As nvcc names it.

    Raises:
        RuntimeError: There is no nvcc, or the text does not compile; the message has its output.
    """
    return _compile(program, architecture, "-Xptxas", "-v")[1]


def _compile(program: Program, architecture: str, *options: str) -> tuple[bytes, str]:
    """The cubin of a program, and what nvcc printed."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, f"{program.name}.cu"), Path(folder, "kernels.cubin")
        source.write_text(program.text, encoding="utf-8")
        command = [*nvcc(architecture), f"-I{CSRC}", *options, "-cubin", "-o", cubin, source]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(
                f"nvcc could not compile {program.source} for sm_{architecture}:\n"
                f"{run.stdout}{run.stderr}"
            )
        return cubin.read_bytes(), run.stderr


def load_launcher() -> None:
    """Registers the operators of csrc/launcher.cpp; builds them unless they are cached.

    Raises:
        RuntimeError: The C++ compiler failed.
    """
    import torch

    if not hasattr(torch.ops.megakernel_tts, "launch"):
        _load_extension(_LAUNCHER)


def _load_extension(source: str) -> None:
    """Loads a C++ source of csrc through torch's cpp_extension; the name gets a digest."""
    import torch
    from torch.utils import cpp_extension

    if shutil.which("ninja") is None:  # torch looks for it on the PATH, where pip may not put it
        import ninja

        os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}"
    digest = hashlib.sha256(" ".join((torch.__version__, *_HOST_FLAGS)).encode())
    digest.update((CSRC / source).read_bytes())
    name = f"megakernel_tts_{Path(source).stem}_{digest.hexdigest()[:12]}"
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    if not (folder / f"{name}.so").exists():
        print(f"Building {source} for torch, once: under a minute.", file=sys.stderr)
    cpp_extension.load(
        name,
        [str(CSRC / source)],
        extra_cflags=[*_HOST_FLAGS],
        extra_ldflags=["-ldl"],
        extra_include_paths=[str(cuda_headers())],
        is_python_module=False,
    )


def cuda_headers() -> Path:
    """Returns the folder of cuda.h, as nvcc finds it.

    Raises:
        RuntimeError: There is no nvcc, or it names no folder.
    """
    command = [*nvcc("90a")[:1], "--dryrun", "-x", "cu", "-c", os.devnull]
    run = subprocess.run(command, capture_output=True, text=True)
    folder = _HEADERS.search(run.stderr)
    if folder is None:
        raise RuntimeError(f"nvcc does not name the folder of cuda.h:\n{run.stdout}{run.stderr}")
    return Path(folder[1])
