"""Conventions of csrc: the sections of kernel files, messages of static asserts, comments."""

import re
from pathlib import Path

import pytest

from megakernel_common.kernels.program import CSRC

SECTIONS = ("static asserts", "shared memory", "warp roles", "body")
# Files of the folders of kernels that hold neither a kernel nor a phase.
SUPPORT_FILES = {
    *(f"decode/{name}.cuh" for name in ("activations", "bf16_split", "block_context", "kernels")),
    *(
        f"decode/{name}.cuh"
        for name in ("phase_context", "rope", "shared_memory", "stream_context")
    ),
    *(
        f"codec/{name}.cuh"
        for name in ("activations", "epilogue", "kernels", "params", "row_window")
    ),
    *(f"codec/{name}.cuh" for name in ("warpgroup_copies", "warpgroup_tile")),
    *(
        f"transducer/{name}.cuh"
        for name in ("grid_barrier", "kernels", "params", "shared_memory", "tiles")
    ),
    *(f"conformer/{name}.cuh" for name in ("kernels", "params", "row_norm", "streams")),
    *(f"align/{name}.cuh" for name in ("edge", "kernels", "lattice", "params", "scores")),
}
_MARKER = re.compile(r"^// --- ([a-z ]+?)(?:: [^\n]+)? ---$", re.MULTILINE)
_ASSERT = re.compile(r"static_assert\((?:[^;]|;(?!\n))*?\);", re.DOTALL)
_FUNCTION = re.compile(r"^ *DEVICE(_NOINLINE)? .*[^}]$")


def relative_name(file: Path) -> str:
    """The name of a file within csrc."""
    return file.relative_to(CSRC).as_posix()


SOURCES = {relative_name(file): file for file in sorted(CSRC.rglob("*.cu*"))}
KERNEL_FILES = sorted(
    name for name in SOURCES if "/" in name and name.endswith(".cuh") and name not in SUPPORT_FILES
)


def test_support_files_exist() -> None:
    assert {*SOURCES} >= SUPPORT_FILES


@pytest.mark.parametrize("name", KERNEL_FILES)
def test_a_kernel_file_has_the_sections_in_order(name: str) -> None:
    text = SOURCES[name].read_text(encoding="utf-8")
    sections = _MARKER.findall(text)
    in_order = sorted((s for s in sections if s in SECTIONS), key=SECTIONS.index)
    assert tuple(dict.fromkeys(in_order)) == SECTIONS
    assert [s for s in sections if s in SECTIONS] == in_order
    asserts = text[text.index("// --- static asserts ---") : text.index("// --- shared memory ---")]
    assert "static_assert(" in asserts


@pytest.mark.parametrize("name", SOURCES)
def test_every_static_assert_has_a_message(name: str) -> None:
    text = SOURCES[name].read_text(encoding="utf-8")
    found = _ASSERT.findall(text)
    assert len(found) == text.count("static_assert(")
    for check in found:
        assert '"' in check, check


@pytest.mark.parametrize("name", SOURCES)
def test_every_device_function_of_several_lines_has_a_comment(name: str) -> None:
    """The comment precedes the function, or a group of functions without blank lines."""
    lines = SOURCES[name].read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if not _FUNCTION.match(line):
            continue
        begin = max(i for i in range(number) if not lines[i].strip())
        group = lines[begin:number]
        assert any(before.lstrip().startswith("//") for before in group), f"{number + 1}: {line}"
