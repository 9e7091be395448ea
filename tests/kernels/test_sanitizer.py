"""The kernels under NVIDIA's tools for races, misused memory and misused barriers."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megakernel_tts.kernels import build

pytestmark = pytest.mark.gpu

_SOURCES = Path(__file__).parents[1] / "sanitizer"
_FOUND = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")
_GATES = 512  # of shared memory, whom racecheck follows; it would stop at fewer than there are

Check = Callable[[str, str, str], tuple[int, str]]


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """What a tool finds when a program does something: how much, and all that it says."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("no compute-sanitizer")
    folder = tmp_path_factory.mktemp("sanitizer")

    def run(tool: str, name: str, what: str) -> tuple[int, str]:
        program = folder / name
        if not program.exists():
            command = build.nvcc(build.architecture_of(torch.device("cuda")))
            subprocess.run([*command, "-o", program, _SOURCES / f"{name}.cu"], check=True)
        command = ["compute-sanitizer", "--tool", tool, "--num-cuda-barriers", str(_GATES)]
        ran = subprocess.run([*command, program, what], capture_output=True, text=True)
        said = ran.stdout + ran.stderr
        found = _FOUND.search(said)
        assert found is not None and ran.returncode == 0, said
        return int(found[1]), said

    return run


@pytest.mark.parametrize("tool", ["racecheck", "memcheck", "synccheck"])
@pytest.mark.parametrize("launch", ["one", "several", "prompts"])
def test_a_kernel_is_clean(check: Check, tool: str, launch: str) -> None:
    found, said = check(tool, "launches", launch)
    assert found == 0, said


@pytest.mark.parametrize(
    ("tool", "fault"), [("racecheck", "race"), ("memcheck", "bounds"), ("synccheck", "barrier")]
)
def test_a_tool_finds_a_fault(check: Check, tool: str, fault: str) -> None:
    found, said = check(tool, "faults", fault)
    assert found > 0, said
