"""The kernels under compute-sanitizer: races, memory accesses and barriers."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megakernel_common.kernels import build
from megakernel_tts.kernels.wide import all_widths, compiled_widths, kernel_names

pytestmark = pytest.mark.gpu

_SOURCES = Path(__file__).parents[1] / "sanitizer"
_FOUND = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")
_NUM_BARRIERS = 512  # mbarriers that racecheck tracks; with fewer than exist, it stops

Check = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """Runs a job of a program under a tool; returns the number of findings, and the output."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("no compute-sanitizer")
    folder = tmp_path_factory.mktemp("sanitizer")

    def run(tool: str, name: str, job: str, *macros: str) -> tuple[int, str]:
        program = folder / "".join((name, *macros))
        if not program.exists():
            command = build.nvcc(build.architecture_of(torch.device("cuda")))
            subprocess.run([*command, *macros, "-o", program, _SOURCES / f"{name}.cu"], check=True)
        command = ["compute-sanitizer", "--tool", tool, "--num-cuda-barriers", str(_NUM_BARRIERS)]
        result = subprocess.run([*command, program, job], capture_output=True, text=True)
        output = result.stdout + result.stderr
        found = _FOUND.search(output)
        assert found is not None and result.returncode == 0, output
        return int(found[1]), output

    return run


@pytest.mark.parametrize("tool", ["racecheck", "memcheck", "synccheck"])
@pytest.mark.parametrize("launch", ["one", "several", "prompts"])
def test_kernels_have_no_findings(check: Check, tool: str, launch: str) -> None:
    found, output = check(tool, "launches", launch)
    assert found == 0, output


@pytest.mark.parametrize("tool", ["racecheck", "memcheck", "synccheck"])
@pytest.mark.parametrize("launch", ["several", "prompts"])
@pytest.mark.parametrize("width", all_widths())
def test_wide_kernels_have_no_findings(check: Check, tool: str, launch: str, width: int) -> None:
    if width not in compiled_widths(build.architecture_of(torch.device("cuda"))):
        pytest.skip(f"this GPU has no kernel for {width} streams")
    if launch == "prompts" and "prefill_wide" not in kernel_names(width):
        pytest.skip(f"the program of {width} streams has no kernel for prompts")
    found, output = check(tool, "launches", launch, f"-DMEGAKERNEL_WIDE_STREAMS={width}")
    assert found == 0, output


@pytest.mark.parametrize(
    ("tool", "fault"), [("racecheck", "race"), ("memcheck", "bounds"), ("synccheck", "barrier")]
)
def test_a_planted_fault_is_found(check: Check, tool: str, fault: str) -> None:
    found, output = check(tool, "faults", fault)
    assert found > 0, output
