"""The Cython package's search as on PyPI, and rebuilt with OpenMP, which its wheel does not use."""

import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PACKAGE = "monotonic_alignment_search"

MaximumPath = Callable[[Tensor, Tensor], Tensor]


def shipped() -> MaximumPath:
    """Returns the package's function: scores and mask on a GPU to a path on the GPU.

    Raises:
        ImportError: The package is not installed.
    """
    return import_module(_PACKAGE).maximum_path


def with_openmp(folder: Path) -> MaximumPath:
    """Builds the package's search with -fopenmp and returns a function like `shipped`.

    Args:
        folder: Folder for the build.

    Raises:
        ImportError: The package or a compiler is not installed, or the compiler failed.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(f"No module named {_PACKAGE!r}")
    compiler, built = shutil.which("gcc"), folder / "core.so"
    if compiler is None:
        raise ImportError("there is no gcc")
    source = Path(spec.origin).parent / "core.c"
    includes = [f"-I{sysconfig.get_paths()['include']}", f"-I{np.get_include()}"]
    command = [compiler, "-O3", "-fopenmp", "-shared", "-fPIC", *includes, str(source)]
    run = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
    if run.returncode:
        raise ImportError(run.stderr.strip().splitlines()[-1])
    found = spec_from_file_location("core", built)
    assert found is not None and found.loader is not None
    core: Any = module_from_spec(found)
    found.loader.exec_module(core)

    def maximum_path(value: Tensor, mask: Tensor) -> Tensor:
        scores = (value * mask).cpu().numpy()
        path = np.zeros_like(scores, dtype=np.int32)
        on_host = mask.cpu().numpy()
        text, frames = on_host.sum(1)[:, 0], on_host.sum(2)[:, 0]
        core.maximum_path_c(path, scores, text.astype(np.int32), frames.astype(np.int32))
        return torch.from_numpy(path).to(value.device, value.dtype)

    return maximum_path
