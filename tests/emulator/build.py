"""Compiles csrc with emulated instructions for the CPU; needs g++ only.

A library is cached in the user's cache folder under a digest of the preprocessed source, the
options and the compiler, so that later runs and parallel test workers share one compilation.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
# Read at import: a fixture redirects XDG_CACHE_HOME while tests run.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megakernel-tts-emulator"
_OPTIONS = (
    "-O1",  # -O2 compiles for twice as long, and saves a twentieth of the tests
    "-march=x86-64-v3",  # converts float16 in hardware
    "-ffp-contract=off",  # products and sums round separately, as with nvcc's -fmad=false
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-fsanitize=alignment",
    "-fno-sanitize-recover=all",
    f"-I{FOLDER}",
)


@functools.cache
def load_library(source: str, *options: str, checks: str = "") -> ctypes.CDLL:
    """Loads the library of a source beside this file; compiles it unless it is cached.

    Args:
        source: Name of the file.
        options: For the compiler, in addition to those of every emulator.
        checks: C++ text that follows the source.

    Returns:
        The library.
    """
    compiler = shutil.which("g++")
    assert compiler is not None, "the emulator needs g++"
    CACHE.mkdir(parents=True, exist_ok=True)
    text = f'#include "{FOLDER / source}"\n{checks}'
    file = CACHE / f"{Path(source).stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cc"
    if not file.exists():
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.rename(file)
    command = [compiler, *_OPTIONS, *options, str(file)]
    library = CACHE / f"{Path(source).stem}-{_digest(command)}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling the same library
        if not library.exists():
            partial = library.with_suffix(".partial")
            subprocess.run([*command, "-o", str(partial)], check=True)
            partial.rename(library)
    return ctypes.CDLL(str(library))


def _digest(command: list[str]) -> str:
    """Digest of a compilation: the compiler, its options and the source with its includes."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    text = subprocess.run([*command, "-E", "-P"], capture_output=True, check=True).stdout
    options = " ".join(command[1:-1]).replace(str(FOLDER), "").encode()
    return hashlib.sha256(b"\0".join((version, options, text))).hexdigest()[:16]
