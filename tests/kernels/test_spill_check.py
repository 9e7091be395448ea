"""The check of spills compiles what the record does not have, and records what passes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megakernel_common.kernels import spill_check
from megakernel_common.kernels.program import ARCHITECTURES, Program
from megakernel_tts.kernels.align import align_program
from megakernel_tts.kernels.codec import codec_program

ALIGN, CODEC = (
    replace(program, architectures=("80", "90a")) for program in (align_program(), codec_program())
)
FINE = "ptxas info: 0 bytes spill stores, 0 bytes spill loads\nUsed 40 registers\nUsed 60 registers"
SPILLED = FINE.replace("0 bytes spill stores", "8 bytes spill stores")

Check = Callable[..., tuple[bool, list[str]]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Checks programs with one record; returns whether they pass and what was compiled."""

    def run(
        *programs: Program, output: str = FINE, compiler: str = "nvcc 1", again: bool = False
    ) -> tuple[bool, list[str]]:
        compiled: list[str] = []

        def compile_program(program: Program, architecture: str) -> str:
            compiled.append(f"{program.name} {architecture}")
            if not output:
                raise RuntimeError("nvcc could not compile it")
            return output

        file = tmp_path / "registers.json"
        passed = spill_check.check(programs, compiler, compile_program, file, again=again)
        return passed, sorted(compiled)

    return run


def test_a_recorded_program_is_compiled_again_only_on_request(check: Check) -> None:
    everything = [f"{name} {a}" for name in (ALIGN.name, CODEC.name) for a in ("80", "90a")]
    assert check(ALIGN, CODEC) == (True, sorted(everything))
    assert check(ALIGN, CODEC) == (True, [])
    assert check(ALIGN, CODEC, again=True) == (True, sorted(everything))


@pytest.mark.parametrize("output", [SPILLED, ""])
def test_a_program_that_fails_is_not_recorded(check: Check, output: str) -> None:
    assert check(ALIGN, output=output) == (False, [f"{ALIGN.name} 80", f"{ALIGN.name} 90a"])
    assert check(ALIGN, output=output) == (False, [f"{ALIGN.name} 80", f"{ALIGN.name} 90a"])
    assert check(ALIGN) == (True, [f"{ALIGN.name} 80", f"{ALIGN.name} 90a"])


def test_only_what_has_changed_is_compiled(check: Check) -> None:
    check(ALIGN, CODEC)
    changed = replace(CODEC, definitions=(("kRows", "8"),))
    assert check(ALIGN, changed) == (True, [f"{CODEC.name} 80", f"{CODEC.name} 90a"])
    assert check(ALIGN, compiler="nvcc 2") == (True, [f"{ALIGN.name} 80", f"{ALIGN.name} 90a"])


def test_registers_are_those_of_the_largest_kernel(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    check(ALIGN, output=SPILLED)
    assert f"sm_90a {ALIGN.name}: 2 kernels, at most 60 registers and 8 bytes spilled" in (
        capsys.readouterr().out
    )


def test_other_shared_memory_of_an_architecture_is_a_change(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(ALIGN)
    monkeypatch.setitem(ARCHITECTURES, "80", 100)
    assert check(ALIGN) == (True, [f"{ALIGN.name} 80"])
