"""NVRTC compiles the kernels from wheels alone; no GPU is needed."""

from dataclasses import replace
from pathlib import Path

import pytest

from megakernel_common.kernels import nvrtc
from megakernel_common.kernels.program import COMMON_FLAGS, CSRC
from megakernel_stt.kernels.conformer import conformer_program
from megakernel_stt.kernels.transducer import transducer_program
from megakernel_tts.kernels.align import align_program
from megakernel_tts.kernels.codec import codec_program
from megakernel_tts.kernels.decode import StackShape, program_of_shapes
from megakernel_tts.kernels.structs import StreamParams

needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))
_STACK = StackShape(128, 4, 2, 384)  # of the smallest checkpoint of the tests
PROGRAM = program_of_shapes(_STACK, _STACK, 256)


_PROGRAMS = {
    "decode": (PROGRAM, ["decode_info"]),
    "decode_wide": (program_of_shapes(_STACK, _STACK, 256, num_streams=16), []),
    "codec": (codec_program(), []),
    "align": (align_program(), ["align_info"]),
    "conformer": (conformer_program(32, 128, 8, 9), []),
    "transducer": (transducer_program(16), ["transducer_info"]),
}


@needs_nvrtc
@pytest.mark.parametrize(
    "name",
    [
        name if name == "transducer" else pytest.param(name, marks=pytest.mark.slow)
        for name in _PROGRAMS
    ],
)
def test_every_kernel_of_a_program_is_compiled(name: str) -> None:
    """With the flags of a user's first start."""
    program, symbols = _PROGRAMS[name]
    cubin = nvrtc.compile_program(program, "90a")
    for symbol in (*program.kernels, *symbols):
        assert f"\0{symbol}\0".encode() in cubin, symbol


@needs_nvrtc
@pytest.mark.parametrize("name", _PROGRAMS)
def test_the_compiler_takes_the_text_of_every_program(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It instantiates the templates and generates no code, which would take seconds."""
    monkeypatch.setattr(nvrtc, "COMMON_FLAGS", (*COMMON_FLAGS, "--fdevice-syntax-only"))
    nvrtc.compile_program(_PROGRAMS[name][0], "90a")


@needs_nvrtc
def test_the_headers_of_cccl_are_not_needed() -> None:
    """The wheels of torch 2.11 do not bring them."""
    headers = nvrtc.find_headers()
    assert headers is not None
    for file in CSRC.rglob("*.cu*"):
        assert "<cuda/" not in file.read_text(encoding="utf-8"), file


@needs_nvrtc
def test_a_text_that_does_not_compile_is_an_error_with_the_log() -> None:
    wrong = replace(PROGRAM, definitions=(("MEGAKERNEL_MODEL", "megakernel::NoModel"),))
    with pytest.raises(RuntimeError, match=r"could not compile decode/kernels.cu:(.|\n)*NoModel"):
        nvrtc.compile_program(wrong, "90a")


@needs_nvrtc
def test_a_struct_that_differs_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamParams, "CPP_NAME", "megakernel::NetworkSampling")
    with pytest.raises(RuntimeError, match="StreamParams has another size"):
        nvrtc.compile_program(PROGRAM, "90a")


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_bindings", lambda: None)
    assert nvrtc.obstacle() == "cuda-bindings is not installed"


def test_headers_of_another_cuda_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder, version in (("cuda_runtime", 12090), ("cu13", 13000)):
        include = tmp_path / "nvidia" / folder / "include"
        include.mkdir(parents=True)
        (include / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    (tmp_path / "nvidia" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nvrtc, "_nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "_package_folders", lambda name: [tmp_path / name])
    assert nvrtc.find_headers() == tmp_path / "nvidia" / "cu13" / "include"
    monkeypatch.setattr(nvrtc, "_nvrtc_version", lambda: (14, 0))
    assert nvrtc.find_headers() is None
