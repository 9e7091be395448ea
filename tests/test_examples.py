"""The examples as a reader starts them; what needs keys is told in words, and faked below."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess:
    keyless = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        cwd=folder,
        env=keyless,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_speech(file: Path, seconds: float) -> None:
    pcm, rate = soundfile.read(file)
    assert len(pcm) / rate >= seconds and np.abs(pcm).max() > 0.05


@pytest.mark.parametrize("example", ["say", "live_text"])
def test_examples_run_and_leave_a_wav(example: str, tmp_path: Path) -> None:
    result = run(example, tmp_path)
    assert result.returncode == 0, result.stderr
    (wav,) = tmp_path.glob("*.wav")
    assert_speech(wav, 0.5)


def test_text_only_says_back_what_is_typed(tmp_path: Path) -> None:
    result = run("text_only", tmp_path, text="Hello there, how are you?\nThank you.\n")
    assert result.returncode == 0, result.stderr
    assert_speech(tmp_path / "text_only.wav", 1.5)


def test_clone_voice_speaks_with_a_recording(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    soundfile.write(tmp_path / "me.wav", rng.uniform(-0.3, 0.3, 24_000 * 3), 24_000)
    model = str(checkpoint("base"))
    result = run(
        "clone_voice", tmp_path, "me.wav", "What is said.", "--model", model, "--seconds", "1"
    )
    assert result.returncode == 0, result.stderr
    pcm, rate = soundfile.read(tmp_path / "clone_voice.wav")
    assert 0 < len(pcm) / rate <= 1 and (tmp_path / "voice.safetensors").is_file()


def test_voice_agent_says_which_key_is_missing(tmp_path: Path) -> None:
    result = run("voice_agent", tmp_path)
    assert result.returncode == 1
    assert "DEEPGRAM_API_KEY is not set" in result.stderr
    assert "examples/text_only.py" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("example", ["text_only", "voice_agent", "clone_voice"])
def test_pipecats_examples_are_short(example: str) -> None:
    lines = (EXAMPLES / f"{example}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120
