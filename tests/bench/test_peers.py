"""Peers of `megakernel-tts bench --peer`, which stand-ins with their interfaces replace."""

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from megakernel_tts.cli.main import main
from tests.bench.options import QUICK


@pytest.mark.parametrize(("kind", "size"), [("base", "0b6"), ("voice_design", "1b7")])
def test_models_without_named_voices_are_measured_without_peers(
    kind: str, size: str, short_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", short_model(kind, size), *QUICK, "--peer"]) == 0
    assert "only with CustomVoice models" in capsys.readouterr().out


# Replaces the clock of the process that measures a peer: `advance` replaces work.
VIRTUAL_CLOCK = """
import __main__
now_s = 0.0

def advance(seconds):
    global now_s
    now_s += seconds

__main__.perf_counter = lambda: now_s
"""
# The part of transformers 5.17 that the peers need: `MimiConfig` without `rope_theta`.
TRANSFORMERS = """
class MimiConfig:
    def __init__(self):
        self.rope_parameters = {"rope_theta": 10000.0}
"""
FASTER = (
    VIRTUAL_CLOCK
    + """
import numpy as np

class FasterQwen3TTS:
    @classmethod
    def from_pretrained(cls, folder, device="cuda", dtype=None):
        import pathlib, torch, transformers
        config = transformers.MimiConfig()
        assert config.rope_theta == config.rope_parameters["rope_theta"]
        assert pathlib.Path(folder, "model.safetensors").is_file()
        assert (device, dtype) == ("cpu", torch.float32)
        return cls()

    def generate_custom_voice_streaming(
        self, text, speaker, language, instruct=None, non_streaming_mode=None, max_new_tokens=2048,
        min_new_tokens=2, temperature=0.9, top_k=50, top_p=1.0, do_sample=True,
        repetition_penalty=1.05, chunk_size=12,
    ):
        assert (speaker, language, do_sample) == ("serena", "Auto", True), (speaker, language)
        for _ in range(4):
            advance(0.01 * chunk_size)
            yield np.zeros(1920 * chunk_size, np.float32), 24000, {}
"""
)
OFFICIAL = (
    VIRTUAL_CLOCK
    + """
import numpy as np

class Qwen3TTSModel:
    @classmethod
    def from_pretrained(cls, folder, **how):
        import transformers
        config = transformers.MimiConfig()
        assert config.rope_theta == config.rope_parameters["rope_theta"]
        assert set(how) == {"device_map", "dtype"}
        return cls()

    def generate_custom_voice(
        self, text, speaker, language="Auto", instruct=None, non_streaming_mode=True, *, do_sample,
        top_k, top_p, temperature, repetition_penalty, subtalker_dosample, subtalker_top_k,
        subtalker_top_p, subtalker_temperature, max_new_tokens,
    ):
        advance(0.1)
        return [np.zeros(1920 * 5, np.float32)], 24000
"""
)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path of this process and its child processes."""
    folder = tmp_path / "packages"
    folder.mkdir()
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_peers_are_measured_through_their_interfaces(
    packages: Path,
    tmp_path: Path,
    short_model: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fake peers with the interfaces of the real ones and known times."""
    (packages / "faster_qwen3_tts.py").write_text(FASTER)
    (packages / "qwen_tts.py").write_text(OFFICIAL)
    (packages / "transformers.py").write_text(TRANSFORMERS)
    file = tmp_path / "a.json"
    assert main(["bench", short_model(), *QUICK, "--peer", "--json", str(file)]) == 0
    faster, official = json.loads(file.read_text(encoding="utf-8"))["peers"]
    assert (faster["note"], official["note"]) == (None, None)
    assert [one["chunk_frames"] for one in faster["figures"]] == [1, 8]
    assert [one["first_chunk_ms"] for one in faster["figures"]] == [10, 80]
    assert [one["ms_per_frame"] for one in faster["figures"]] == [10, 10]
    assert [one["real_time_factor"] for one in faster["figures"]] == [0.125, 0.125]
    (whole,) = official["figures"]
    assert (whole["chunk_frames"], whole["first_chunk_ms"]) == (None, 100)
    assert (whole["ms_per_frame"], whole["real_time_factor"]) == (20, 0.25)
    printed = capsys.readouterr().out
    assert "chunk 8: first chunk" in printed and "whole speech: first chunk" in printed


def test_peer_that_fails_or_is_missing_gives_a_note(
    packages: Path, short_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    (packages / "faster_qwen3_tts.py").write_text("raise RuntimeError('no CUDA here')")
    assert main(["bench", short_model(), *QUICK, "--peer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "faster-qwen3-tts failed: RuntimeError: no CUDA here" in lines
    if find_spec("qwen_tts") is None:
        assert "qwen-tts is not installed, so it was not measured." in lines
