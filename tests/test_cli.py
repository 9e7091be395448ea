import os
import re
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

import megakernel_tts
from megakernel_tts.cli import main

Run = subprocess.CompletedProcess[bytes]


def program(*arguments: str, **how: object) -> Run:
    command = [sys.executable, "-m", "megakernel_tts.cli", *arguments]
    return subprocess.run(command, capture_output=True, timeout=120, **how)  # type: ignore[call-overload]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short speech: these tests are about the command line."""
    from megakernel_tts import TTS, Sampling

    short = property(lambda self: Sampling(seed=1, max_frames=4))
    monkeypatch.setattr(TTS, "sampling", short)


def test_say_writes_a_wav_and_ends_with_one_line(tmp_path: Path) -> None:
    """As a user would: another process, the embedded model, no options but where to."""
    output = tmp_path / "hello.wav"
    run = program("say", "Hello", "-o", str(output), "--seed", "1")
    assert run.returncode == 0, run.stderr
    with wave.open(str(output)) as file:
        assert file.getframerate() == 24_000
        seconds = file.getnframes() / 24_000
    lines = run.stderr.decode().strip().splitlines()
    assert "only makes noise" in lines[0] and "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice" in lines[0]
    assert lines[-1].startswith(f"{seconds:.2f} s of audio in {output}, first chunk after ")
    assert re.search(r"first chunk after \d+ ms, real-time factor \d+\.\d\d$", lines[-1])
    assert run.stdout == b""


def test_raw_pcm_to_standard_output_from_standard_input() -> None:
    run = program("say", "-", "--seed", "1", input=b"Hello")
    assert run.returncode == 0
    samples = np.frombuffer(run.stdout, "<i2")
    assert len(samples) % 1920 == 0 and len(samples) > 0


def test_a_file_and_options(tmp_path: Path, checkpoint: Callable[..., Path], quick: None) -> None:
    text = tmp_path / "text.txt"
    text.write_text("你好，世界。", encoding="utf-8")
    output = tmp_path / "a.wav"
    model = str(checkpoint("custom_voice", "1b7"))
    arguments = ["--model", model, "--voice", "eric", "--language", "Chinese", "--instruct", "low"]
    assert main(["say", "-f", str(text), "-o", str(output), "--device", "cpu", *arguments]) == 0
    assert soundfile.info(output).frames == 4 * 1920


def test_a_cloned_voice_is_used_kept_and_used_again(
    tmp_path: Path, checkpoint: Callable[..., Path], quick: None
) -> None:
    reference = tmp_path / "ref.wav"
    soundfile.write(reference, 0.1 * np.random.RandomState(0).standard_normal(24_000), 24_000)
    model, kept = str(checkpoint("base")), str(tmp_path / "kept.safetensors")
    one, two = tmp_path / "one.wav", tmp_path / "two.wav"
    clone = ["--clone", str(reference), "--ref-text", "hello", "--save-voice", kept]
    assert main(["say", "Hi", "-o", str(one), "--model", model, *clone]) == 0
    assert main(["say", "Hi", "-o", str(two), "--model", model, "--voice", kept]) == 0
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["say"], 2, "give a text, - for standard input, or --file"),
        (["say", "x", "-f", "y", "-o", "z.wav"], 2, "one of them"),
        (["say", "x", "-o", "z.wav", "--voice", "a", "--clone", "b"], 2, "name two voices"),
        (["say", "x", "-o", "z.wav", "--ref-text", "b"], 2, "--ref-text belongs to a recording"),
        (["say", "  ", "-o", "z.wav"], 1, "nothing to say"),
        (["say", "x", "-o", "z.wav", "--voice", "nobody"], 1, "choose one of: serena, ryan"),
        (["say", "x", "-o", "z.wav", "--language", "xx"], 1, "choose auto or one of: chinese"),
        (["say", "x", "-o", "z.wav", "--model", "/none"], 1, "is no model: name a folder"),
        (["say", "x", "-o", "z.wav", "--model", "a/b"], 1, "could not be fetched from the hub"),
        (["say", "x", "-o", "z.wav", "--device", "tpu"], 1, "choose auto, cpu, cuda"),
        (["say", "x", "-o", "/none/z.wav"], 2, "/none is no folder"),
        (["say", "x", "-o", "/"], 2, "/ is no regular file"),
        (["say", "x", "-o", "z.wav", "--clone", "none.wav"], 1, "only Base models clone"),
        (["say", "x", "-o", "z.wav", "--voice", "v.safetensors"], 1, "does not exist"),
        (["say", "x", "-o", "z.wav", "--seed", "-4"], 1, "seed is -4; it must be"),
        (["say", "-f", "none.txt", "-o", "z.wav"], 1, "none.txt"),
        (["voices", "--model", "/none"], 1, "is no model"),
    ],
)  # fmt: skip
def test_a_users_mistake_gets_a_sentence_and_no_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "z.wav").exists()


def test_unknown_options_and_bad_input_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["sing"], ["say", "x", "--loud"], ["say", "x", "--seed", "y"], []):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert program("say", "-", input=b"\xff\xfe\xff").returncode == 2


def test_an_interrupt_keeps_what_was_written(tmp_path: Path) -> None:
    output = tmp_path / "a.wav"
    text = "A long text that goes on and on. " * 400
    command = [sys.executable, "-m", "megakernel_tts.cli", "say", text, "-o", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not output.exists() or output.stat().st_size < 20_000):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"interrupted" in error and b"Traceback" not in error
    assert soundfile.info(output).frames >= 1920


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m megakernel_tts.cli say 'hello to you. ' --seed 1 | head -c 10"
    run = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert len(run.stdout) == 10 and b"Traceback" not in run.stderr


def test_voices_lists_them_with_languages(
    capsys: pytest.CaptureFixture[str], checkpoint: Callable[..., Path]
) -> None:
    assert main(["voices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["serena", "ryan", "eric", "dylan"]
    assert "english" in lines[0] and "sichuan_dialect, chinese" in lines[2]
    assert main(["voices", "--model", str(checkpoint("base"))]) == 0
    assert "--clone" in capsys.readouterr().out
    assert main(["voices", "--model", str(checkpoint("voice_design", "1b7"))]) == 0
    assert "--instruct" in capsys.readouterr().out


def test_doctor_reports_and_help_helps(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = main(["doctor"]), capsys.readouterr().out
    assert "This machine can speak." in report if code == 0 else "MISSING" in report
    for arguments in (["--help"], ["say", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    assert megakernel_tts.__version__ in capsys.readouterr().out


def test_help_loads_no_torch() -> None:
    check = (
        "import sys; from megakernel_tts.cli import main\n"
        "try: main(['say', '--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", check], capture_output=True, env=os.environ
        ).returncode
        == 0
    )
