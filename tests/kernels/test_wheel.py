"""The wheel: four packages, with CUDA sources and files of the web page as package data."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("megakernel_common", "megakernel_stt", "megakernel_tts", "pipecat_service")
SUFFIXES = {".cpp", ".cu", ".cuh"}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of a wheel that is built from a copy of the checkout."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*PACKAGES, "csrc", "tests", "bench"):
        ignored = shutil.ignore_patterns("__pycache__", "*.wav", "*.safetensors")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    script = (
        "import sys\nfrom setuptools import build_meta\nprint(build_meta.build_wheel(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, str(folder)]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_installs_four_typed_packages(names: set[str]) -> None:
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_wheel_has_every_module(names: set[str]) -> None:
    modules = {
        file.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
    }
    assert modules <= names


def test_the_wheel_has_every_cuda_source(names: set[str]) -> None:
    sources = {
        f"megakernel_common/csrc/{file.relative_to(ROOT / 'csrc').as_posix()}"
        for file in (ROOT / "csrc").rglob("*")
        if file.suffix in SUFFIXES
    }
    assert sources and {name for name in names if Path(name).suffix in SUFFIXES} == sources


def test_the_wheel_has_every_file_of_the_page(names: set[str]) -> None:
    folder = ROOT / "megakernel_tts" / "server" / "static"
    files = {file.relative_to(ROOT).as_posix() for file in folder.iterdir()}
    assert files and files <= names
