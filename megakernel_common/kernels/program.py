"""A program: the text of a family of kernels, for one model and one build variant."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megakernel_common.kernels.declarations import Declaration, declaration_checks


def _find_sources() -> Path:
    """The CUDA sources: package data if installed, beside the package in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


CSRC = _find_sources()
# Architecture -> KiB of shared memory of a thread block. With "a", warps can move registers.
ARCHITECTURES = {"80": 163, "86": 99, "89": 99, "90a": 227, "100a": 227, "120a": 99}
# Without contraction, or kernels compiled for one column and for many would round differently.
COMMON_FLAGS = ("-std=c++20", "-fmad=false")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """Kernels that are compiled together.

    Attributes:
        name: Of the family; part of the file's name in the cache.
        source: The file of csrc.
        kernels: Names of the kernels.
        declarations: Structs, enumerations and constants that Python shares with them.
        definitions: Macros and their values.
        architectures: Those for which it is made.
    """

    name: str
    source: str
    kernels: tuple[str, ...]
    declarations: tuple[Declaration, ...]
    definitions: tuple[tuple[str, str], ...] = ()
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)

    @property
    def text(self) -> str:
        """What is compiled: macros, the source, the checks of the declarations."""
        lines = [f"#define {macro} {value}" for macro, value in self.definitions]
        return "\n".join(
            [*lines, f'#include "{self.source}"', declaration_checks(self.declarations)]
        )

    def digest(self, architecture: str, compiler: str) -> str:
        """Digest of what a build depends on: the text, the sources that it includes, the flags.

        Args:
            architecture: As nvcc names it, such as `90a`.
            compiler: The compiler's name, version and flags of its own.
        """
        build = (architecture, *COMMON_FLAGS, *architecture_flags(architecture), compiler)
        digest = hashlib.sha256("\0".join((self.text, *build)).encode())
        for file in sorted({*_with_included((CSRC / self.source).resolve())}):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]


def _with_included(source: Path) -> Iterator[Path]:
    """A source of csrc and what it includes of csrc; a file may come several times."""
    yield source
    for name in _INCLUDE.findall(source.read_text(encoding="utf-8")):
        included = (source.parent / name).resolve()
        if included.exists():  # the emulator's header is only where the emulator is built
            yield from _with_included(included)


def architecture_flags(architecture: str) -> list[str]:
    """Macros that describe an architecture to the sources.

    Args:
        architecture: As nvcc names it, such as `90a`. An unknown one has the least shared memory.
    """
    macros = [f"-DMEGAKERNEL_SHARED_KB={ARCHITECTURES.get(architecture, 99)}"]
    if architecture.endswith("a"):
        macros.append("-DMEGAKERNEL_MOVES_REGISTERS")
    return macros
