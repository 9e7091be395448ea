"""Compiles programs for every architecture, and records which of them spill no register.

Compiling all of them takes minutes. The record has digests of what was compiled, so that a check
compiles only what has changed since.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from megakernel_common.kernels.program import ARCHITECTURES, Program

# Compiles a program for an architecture and returns what `ptxas -v` printed. Raises RuntimeError
# if it does not compile.
Compile = Callable[[Program, str], str]

_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores")


@dataclass(frozen=True)
class Usage:
    """What the kernels of a program use on an architecture.

    Attributes:
        program: Name of the program.
        architecture: As nvcc names it.
        kernels: Number of kernels.
        registers: Most registers of a thread.
        spilled_bytes: Most bytes of registers that a thread keeps in memory.
    """

    program: str
    architecture: str
    kernels: int
    registers: int
    spilled_bytes: int

    def __str__(self) -> str:
        return (
            f"sm_{self.architecture} {self.program}: {self.kernels} kernels, at most "
            f"{self.registers} registers and {self.spilled_bytes} bytes spilled, at most "
            f"{ARCHITECTURES[self.architecture]} KiB of shared memory"
        )


def check(
    programs: Sequence[Program],
    compiler: str,
    compile_program: Compile,
    record_file: Path,
    *,
    again: bool,
) -> bool:
    """Prints what every program uses on each of its architectures.

    Args:
        programs: The programs.
        compiler: Version and flags of the compiler.
        compile_program: Compiles a program that is not recorded.
        record_file: The record. It then has the programs that spill nothing, of this check only.
        again: Whether programs in the record are compiled, too.

    Returns:
        Whether all programs compile without warnings, and nothing is spilled.
    """
    recorded = {} if again else _read(record_file)
    passed: dict[str, Usage] = {}

    def check_one(program: Program, architecture: str) -> str:
        digest = program.digest(architecture, compiler)
        usage = recorded.get(digest)
        source = "" if usage is None else " (recorded)"
        if usage is None:
            try:
                usage = _usage(program, architecture, compile_program(program, architecture))
            except RuntimeError as error:
                return f"sm_{architecture} {program.name}: {error}"
        if usage.spilled_bytes == 0:
            passed[digest] = usage
        return f"{usage}{source}"

    jobs = [
        (program, architecture) for program in programs for architecture in program.architectures
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(check_one, *zip(*jobs, strict=True)):
            print(line, flush=True)
    _write(record_file, passed)
    return len(passed) == len(jobs)


def _usage(program: Program, architecture: str, output: str) -> Usage:
    used = [int(count) for count in _USED.findall(output)]
    spilled = max(map(int, _SPILLED.findall(output)), default=0)
    return Usage(program.name, architecture, len(used), max(used, default=0), spilled)


def _read(file: Path) -> dict[str, Usage]:
    """Usage of the recorded programs by digest; empty if there is no such file."""
    if not file.exists():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return {digest: Usage(**usage) for digest, usage in content.items()}


def _write(file: Path, passed: dict[str, Usage]) -> None:
    in_order = sorted(passed.items(), key=lambda item: (str(item[1]), item[0]))
    lines = (f" {json.dumps(digest)}: {json.dumps(asdict(usage))}" for digest, usage in in_order)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
