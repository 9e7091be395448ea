from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megakernel_tts.backends.select import pick_dtype
from megakernel_tts.cli import doctor


def texts() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"ok": [], "note": [], "missing": []}
    for finding in doctor.examine():
        found[finding.status].append(finding.text)
    return found


def test_this_machine_has_all_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():  # a driver without a usable GPU would be reported, rightly
        monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = texts()
    assert found["missing"] == []
    assert any(text.startswith(f"torch {torch.__version__}") for text in found["ok"])
    assert any(text.startswith("soundfile") for text in found["ok"])


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor, "system_memory", lambda: 2 << 30)
    found = texts()
    assert any("torch 2.4.1+cpu is not supported" in text for text in found["missing"])
    assert any("sees no GPU" in text for text in found["note"])
    assert any("cpu: the 1.7B models need about" in text for text in found["note"])


@pytest.mark.parametrize(
    ("capability", "no_extension", "no_nvrtc", "status", "sentence"),
    [
        ((9, 0), None, "no NVRTC", "ok", "cuda:0: kernels are compiled with nvcc"),
        ((9, 0), "no nvcc", None, "ok", "cuda:0: kernels are compiled with NVRTC"),
        ((9, 0), "no nvcc", "no NVRTC", "note", "cannot be compiled: no nvcc, and no NVRTC"),
        ((7, 5), None, None, "note", "need compute capability 8.0, and cuda:0 has 7.5"),
    ],
)
def test_the_path_of_the_kernels_is_reported_and_decides_the_dtype(
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
    monkeypatch.setattr("megakernel_tts.kernels.build.obstacle", lambda: no_extension)
    monkeypatch.setattr("megakernel_tts.kernels.nvrtc.obstacle", lambda: no_nvrtc)
    assert any(sentence in text for text in texts()[status])
    chosen = pick_dtype("auto", torch.device("cuda", 0))
    assert chosen == (torch.bfloat16 if status == "ok" else torch.float32)


def test_folders_that_cannot_be_written_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file in a folder's place stops the superuser, too."""
    (tmp_path / "file").touch()
    for variable in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = texts()
    assert found["missing"] == []
    for folder in ("huggingface/hub",):
        named = f"{tmp_path / 'file' / folder} cannot be written to"
        assert any(text.startswith(named) for text in found["note"])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not any("cannot be written" in text for text in texts()["note"])
