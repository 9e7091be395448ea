"""What this machine can run, and what it lacks, in plain words."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megakernel_tts.machine import system_memory

Status = Literal["ok", "note", "missing"]

_GIB = 1 << 30
_DOWNLOAD = 5.0  # GiB: a 1.7B model
_OLDEST_TORCH = (2, 11)
# Weights, eight slots of keys and values, codec: GiB in bfloat16 and in float32.
_MODELS = {"0.6B": (4.3, 8.1), "1.7B": (6.2, 11.8)}


_COMPILERS = {"extension": "nvcc, and launched by a torch extension", "nvrtc": "NVRTC"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    status: Status
    text: str


def examine() -> Iterator[Finding]:
    """Looks at this machine, one finding after the other."""
    yield Finding(
        "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield from _packages()
    try:
        import torch
    except ImportError as error:
        yield Finding("missing", f"torch cannot be imported ({error}); pip install 'torch>=2.11'")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        yield Finding(
            "missing", f"torch {torch.__version__} is not supported; pip install 'torch>=2.11'"
        )
    else:
        yield Finding("ok", f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads")
    if torch.cuda.is_available():
        from megakernel_tts.kernels.loader import cache_folder, support

        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            memory = gpu.total_memory / _GIB
            yield Finding(
                "ok", f"cuda:{i}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {memory:.0f} GiB"
            )
            yield from _fits(f"cuda:{i}", memory, in_bfloat16=True)
            kernels = support(torch.device("cuda", i))
            if kernels.path is None:
                yield Finding("note", f"{kernels.obstacle} cuda:{i} runs plain torch in float32.")
            else:
                yield Finding(
                    "ok",
                    f"cuda:{i}: kernels are compiled with {_COMPILERS[kernels.path]}, at the first "
                    f"use, and kept in {cache_folder()}",
                )
    elif shutil.which("nvidia-smi"):
        yield Finding(
            "note",
            "There is an NVIDIA driver, but this torch sees no GPU: it is a CPU build, or the "
            f"driver is older than its CUDA ({torch.version.cuda or 'none'}). Install a CUDA "
            "build of torch.",
        )
    else:
        yield Finding(
            "note", "No GPU: speech is made on the CPU, the released models far below real time"
        )
    memory = system_memory()
    if memory:
        yield from _fits("cpu", memory / _GIB, in_bfloat16=False)
    yield from _storage()


def _packages() -> Iterator[Finding]:
    for name in ("safetensors", "tokenizers", "huggingface-hub", "soundfile", "soxr", "ninja"):
        try:
            yield Finding("ok", f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("missing", f"{name} is not installed; pip install {name}")
    try:
        import soundfile  # noqa: F401
    except (ImportError, OSError) as error:
        yield Finding(
            "missing", f"soundfile cannot find libsndfile ({error}); voices cannot be cloned"
        )


def _fits(device: str, memory: float, *, in_bfloat16: bool) -> Iterator[Finding]:
    for model, (small, large) in _MODELS.items():
        need = small if in_bfloat16 else large
        if need <= memory:
            yield Finding("ok", f"{device}: the {model} models fit (about {need} GiB, 8 streams)")
        else:
            yield Finding(
                "note",
                f"{device}: the {model} models need about {need} GiB of {memory:.0f}; "
                "use fewer slots",
            )


def _storage() -> Iterator[Finding]:
    """The folder that downloaded models are kept in; a model's own folder does without it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    place = next((p for p in (folder, *folder.parents) if p.exists()), None)
    if place is None or not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        text = f"{folder} cannot be written to, and downloaded models go there"
        yield Finding("note", f"{text}; point HF_HUB_CACHE to a folder that can")
    else:
        free = shutil.disk_usage(place).free / _GIB
        text = f"{free:.0f} GiB free for downloaded models in {folder}"
        yield Finding("ok" if free >= _DOWNLOAD else "note", text)
