"""The cache of compiled kernels, and the choice of how to compile and launch them."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megakernel_common.kernels import build, loader, nvrtc
from megakernel_common.kernels.program import CSRC, Program
from megakernel_tts.kernels.codec import codec_program
from megakernel_tts.kernels.models import all_programs, released_programs

CUDA = torch.device("cuda", 0)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megakernel-tts" / "kernels"


def test_a_program_is_compiled_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, compiled = released_programs()[0], list[str]()

    def compile_program(program: Program, architecture: str) -> bytes:
        compiled.append(architecture)
        return b"cubin of " + architecture.encode()

    for architecture in ("90a", "90a", "80"):
        found = loader.compiled(program, architecture, "compiler 1", compile_program)
        assert found == b"cubin of " + architecture.encode()
    assert compiled == ["90a", "80"]
    assert capsys.readouterr().err.count("Compiling the decode kernels") == 2
    assert sorted(file.suffix for file in cache.iterdir()) == [".cubin", ".cubin"]


def test_only_kernels_are_shared_between_sessions_of_the_tests(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    isolated = tmp_path_factory.getbasetemp().resolve()
    assert isolated in loader.cache_folder().parent.resolve().parents
    assert isolated not in loader.cache_folder().resolve().parents


def test_a_failed_compilation_leaves_no_file(cache: Path) -> None:
    def fail(program: Program, architecture: str) -> bytes:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        loader.compiled(released_programs()[0], "90a", "compiler 1", fail)
    assert not cache.exists()


def test_what_a_build_depends_on_is_part_of_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    program = released_programs()[0]
    variants = {
        program.digest("90a", "compiler 1"),
        program.digest("80", "compiler 1"),
        program.digest("90a", "compiler 2"),
        replace(program, definitions=()).digest("90a", "compiler 1"),
        replace(program, declarations=program.declarations[1:]).digest("90a", "compiler 1"),
        released_programs()[1].digest("90a", "compiler 1"),
    }
    assert len(variants) == 6
    assert program.digest("90a", "compiler 1") in variants
    monkeypatch.setattr("megakernel_common.kernels.program.COMMON_FLAGS", ("-std=c++20",))
    assert program.digest("90a", "compiler 1") not in variants
    assert len({program.text for program in all_programs()}) == len(all_programs())


def test_a_digest_changes_with_the_sources_that_the_program_includes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CSRC, tmp_path / "csrc")
    monkeypatch.setattr("megakernel_common.kernels.program.CSRC", tmp_path / "csrc")
    codec = codec_program()
    before = codec.digest("90a", "compiler 1")
    for name, affects in (
        ("codec/kernels.cu", True),
        ("codec/row_window.cuh", True),  # included by a file that kernels.cu includes
        ("memory.cuh", True),
        ("transducer/joint.cuh", False),
    ):
        with (tmp_path / "csrc" / name).open("a") as file:
            file.write("// changed\n")
        assert (codec.digest("90a", "compiler 1") != before) == affects, name
        before = codec.digest("90a", "compiler 1")


@pytest.mark.parametrize(
    ("no_extension", "no_nvrtc", "path", "sentence"),
    [
        (None, None, "extension", ""),
        (None, "no NVRTC", "extension", ""),
        ("there is no nvcc", None, "nvrtc", ""),
        ("there is no nvcc", "no NVRTC", None, "there is no nvcc, and no NVRTC. Install torch's"),
    ],
)
def test_the_extension_is_preferred_to_nvrtc(
    monkeypatch: pytest.MonkeyPatch,
    no_extension: str | None,
    no_nvrtc: str | None,
    path: str | None,
    sentence: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(build, "obstacle", lambda: no_extension)
    monkeypatch.setattr(nvrtc, "obstacle", lambda: no_nvrtc)
    found = loader.support(CUDA)
    assert found.path == path and sentence in found.obstacle
    if path is None:
        with pytest.raises(RuntimeError, match="Or use dtype='float32' for plain torch"):
            loader.load_module(released_programs()[0], CUDA)


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert loader.obstacle(CUDA) == ("The kernels need compute capability 8.0, and cuda:0 has 7.5.")
