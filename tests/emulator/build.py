"""Compiles csrc with emulated instructions; g++ is all it takes."""

import ctypes
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent


def compiled(source: str, library: Path, *options: str) -> ctypes.CDLL:
    """The library of one of the sources beside this file, compiled unless it is there.

    Args:
        source: The file's name.
        library: Where it goes.
        options: For the compiler.
    """
    compiler = shutil.which("g++")
    assert compiler is not None, "the emulator needs g++"
    if not library.exists():
        command = [compiler, "-O2", "-std=c++20", "-fPIC", "-shared"]
        command += ["-fsanitize=alignment", "-fno-sanitize-recover=all", f"-I{FOLDER}", *options]
        subprocess.run([*command, "-o", str(library), str(FOLDER / source)], check=True)
    return ctypes.CDLL(str(library))
