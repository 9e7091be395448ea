"""Builds the CUDA kernel: the only file that knows nvcc.

    python build_ext.py            # for the GPU that is here
    python build_ext.py --check    # every architecture to machine code, no GPU needed

The first use of a CUDA device builds it too. What was built is kept in torch's extension folder
under a name that tells sources, flags and torch's version.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CSRC = Path(__file__).parent / "csrc"
ARCHITECTURES = ("80", "86", "89", "90a", "100", "120")
FLAGS = ("-O3", "-std=c++20", "-Werror", "all-warnings")


def sources() -> list[Path]:
    """The two translation units."""
    return [CSRC / "frame.cu", CSRC / "ops.cpp"]


def load() -> None:
    """Builds what is not built yet and registers the operators.

    Raises:
        RuntimeError: There is no nvcc, or it failed.
    """
    import torch
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        raise RuntimeError(
            "The CUDA kernel must be built once, and there is no nvcc: install the CUDA toolkit "
            f"{torch.version.cuda} (or set CUDA_HOME), or use dtype='float32' for plain torch."
        )
    major, minor = torch.cuda.get_device_capability()
    digest = hashlib.sha256("".join((torch.__version__, *FLAGS, f"{major}{minor}")).encode())
    for file in sorted(CSRC.rglob("*.c*")):
        digest.update(file.read_bytes())
    name = f"megakernel_tts_{digest.hexdigest()[:12]}"
    if not (Path(cpp_extension._get_build_directory(name, verbose=False)) / f"{name}.so").exists():
        print("Building the CUDA kernel for this GPU, once; about two minutes.", file=sys.stderr)
    suffix = "a" if major >= 9 else ""
    cpp_extension.load(
        name,
        [str(file) for file in sources()],
        extra_cflags=["-O2", "-std=c++20"],
        extra_cuda_cflags=[*FLAGS, f"-gencode=arch=compute_{major}{minor}{suffix},code=sm_{major}{minor}{suffix}"],
        is_python_module=False,
    )
