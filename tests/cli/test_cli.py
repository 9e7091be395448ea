import json
import os
import re
import shutil
import signal
import subprocess
import sys
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile

import megakernel_tts
from megakernel_tts import TTS
from megakernel_tts.cli.main import main
from megakernel_tts.engine import guard
from tests.comparison import assert_same_speech
from tests.fakes import TIMEOUT_S

Run = subprocess.CompletedProcess[bytes]


# The command, which also prints a line to its unused standard output for every chunk in the file.
ANNOUNCING = """
import sys
from megakernel_tts import audio
from megakernel_tts.cli.main import main

def write_and_announce(writer, pcm, write=audio.WavWriter.write):
    write(writer, pcm)
    print("written", flush=True)

audio.WavWriter.write = write_and_announce
sys.exit(main(sys.argv[1:]))
"""


def program(*arguments: str, **keywords: object) -> Run:
    command = [sys.executable, "-m", "megakernel_tts", *arguments]
    return subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, **keywords)  # type: ignore[call-overload]


def test_say_writes_a_wav_file_and_prints_a_summary(tmp_path: Path) -> None:
    """In another process, with the demo model and without options except for the output."""
    output = tmp_path / "hello.wav"
    run = program("say", "Hello", "-o", str(output), "--seed", "1")
    assert run.returncode == 0, run.stderr
    with wave.open(str(output)) as file:
        assert file.getframerate() == 24_000
        seconds = file.getnframes() / 24_000
    lines = run.stderr.decode().strip().splitlines()
    assert (
        "small demonstration voice" in lines[0]
        and "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice" in lines[0]
    )
    assert lines[-1].startswith(f"{seconds:.2f} s of audio in {output}, first chunk after ")
    assert re.search(r"first chunk after \d+ ms, real-time factor \d+\.\d\d, seed 1$", lines[-1])
    assert run.stdout == b""


def test_say_takes_a_text_file_and_style_options(
    tmp_path: Path, checkpoint: Callable[..., Path], short_speech: None
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("你好，世界。", encoding="utf-8")
    output = tmp_path / "a.wav"
    model = str(checkpoint("custom_voice", "1b7"))
    arguments = ["--model", model, "--voice", "eric", "--language", "Chinese", "--instruct", "low"]
    assert main(["say", "-f", str(text), "-o", str(output), "--device", "cpu", *arguments]) == 0
    assert soundfile.info(output).frames == 4 * 1920


def test_speed_and_pronunciations_reach_the_engine(
    short_speech: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole and of live text."""
    opened: list[dict[str, object]] = []
    for name in ("open", "stream"):
        function = getattr(TTS, name)

        def recorded(*arguments: object, function: object = function, **keywords: object) -> object:
            opened.append(keywords)
            return function(*arguments, **keywords)  # type: ignore[operator]

        monkeypatch.setattr(TTS, name, recorded)
    table, text, output = (tmp_path / name for name in ("table.json", "text", "a.wav"))
    table.write_text('{"GPU": "gee pee you"}', encoding="utf-8")
    text.write_text("A GPU.", encoding="utf-8")
    options = ["-o", str(output), "--speed", "2", "--pronunciations", str(table)]
    with text.open(encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        for source in (["--file", str(text)], ["-"]):
            assert main(["say", *source, *options]) == 0
            assert len(soundfile.read(output)[0]) == 4 * 1920 / 2
    assert [(keywords["speed"], keywords["pronunciations"]) for keywords in opened] == [
        (2.0, {"GPU": "gee pee you"})
    ] * 2


def test_saved_voice_gives_the_same_speech_as_the_cloned_one(
    tmp_path: Path, checkpoint: Callable[..., Path], short_speech: None
) -> None:
    reference = tmp_path / "ref.wav"
    soundfile.write(reference, 0.1 * np.random.RandomState(0).standard_normal(24_000), 24_000)
    model, voice = str(checkpoint("base")), str(tmp_path / "voice.safetensors")
    cloned, loaded = tmp_path / "cloned.wav", tmp_path / "loaded.wav"
    clone = ["--clone", str(reference), "--ref-text", "hello", "--save-voice", voice]
    assert main(["say", "Hi", "-o", str(cloned), "--model", model, *clone]) == 0
    assert main(["say", "Hi", "-o", str(loaded), "--model", model, "--voice", voice]) == 0
    samples = [soundfile.read(file, dtype="int16")[0].astype(int) for file in (cloned, loaded)]
    assert len(samples[0]) == len(samples[1])
    assert np.abs(samples[0] - samples[1]).max() <= 1  # chunk sizes, which depend on times, round


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["say"], 2, "give a text, - for standard input, or --file"),
        (["say", "x", "-f", "y", "-o", "z.wav"], 2, "one of them"),
        (["say", "x", "-o", "z.wav", "--voice", "a", "--clone", "b"], 2, "select two voices"),
        (["say", "x", "-o", "z.wav", "--ref-text", "b"], 2, "--ref-text needs a recording"),
        (["say", "  ", "-o", "z.wav"], 1, "nothing to say"),
        (["say", "x", "-o", "z.wav", "--voice", "x"], 1, "clara, henry, olivia, lucia"),
        (["say", "x", "-o", "z.wav", "--language", "xx"], 1, "auto or one of: english, spanish"),
        (["say", "x", "-o", "z.wav", "--model", "/none"], 1, "is not a model: name a folder"),
        (["say", "x", "-o", "z.wav", "--model", "a/b"], 1, "could not be downloaded from the hub"),
        (["say", "x", "-o", "z.wav", "--device", "tpu"], 1, "choose auto, cpu, cuda"),
        (["say", "x", "-o", "/none/z.wav"], 2, "/none is not a folder"),
        (["say", "x", "-o", "/"], 2, "/ is not a regular file"),
        (["say", "x", "-o", "z.mp3"], 2, "z.mp3: only wav files are supported; name it z.wav"),
        (["say", "x", "-o", "z.wav", "--clone", "none.wav"], 2, "--clone, or --voice with a file"),
        (["say", "x", "-o", "z.wav", "--voice", "v.safetensors"], 2, "with --clone and --save-voi"),
        (["say", "x", "-o", "z.wav", "--instruct", "low"], 2, "does not support --instruct"),
        (["say", "a\udcff", "-o", "z.wav"], 1, "half of a character, as character 1"),
        (["say", "x", "-o", "z.wav", "--save-voice", "v"], 2, "--save-voice needs a recording"),
        (["say", "-f", "none.txt", "-o", "z.wav"], 1, "none.txt"),
        (["voices", "--model", "/none"], 1, "is not a model"),
    ],
)  # fmt: skip
def test_invalid_arguments_give_a_message_without_traceback(
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


def test_unknown_commands_and_options_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["sing"], ["say", "x", "--loud"], ["say", "x", "--seed", "y"], []):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


@pytest.mark.parametrize(
    ("kind", "size", "arguments", "message"),
    [
        ("base", "0b6", [], "give --clone with a recording (and --ref-text"),
        ("base", "0b6", ["--voice", "ryan"], "or --voice with a file from --save-voice"),
        ("base", "0b6", ["--clone", "me.wav", "--instruct", "low"], "not support --instruct"),
        ("voice_design", "1b7", [], "describe one with --instruct"),
        ("voice_design", "1b7", ["--voice", "ryan", "--instruct", "low"], "leave --voice out"),
        ("voice_design", "1b7", ["--clone", "me.wav"], "needs a Base model"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused_by_option_name(
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    kind: str,
    size: str,
    arguments: list[str],
    message: str,
) -> None:
    output = tmp_path / "a.wav"
    model = str(checkpoint(kind, size))
    assert main(["say", "x", "-o", str(output), "--model", model, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"max_new_tokens": 1}, "reached the maximum length"),
        # Nearly greedy sampling, which never ends the speech, for any seed.
        ({"temperature": 1e-6, "subtalker_temperature": 1e-6}, "continued after its text"),
    ],
    ids=["length", "guard"],
)
def test_incomplete_speech_is_explained_and_its_random_seed_printed(
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, float],
    reason: str,
) -> None:
    monkeypatch.setattr(guard, "_GRACE_FRAMES", 0)  # ends the speech earlier
    model = shutil.copytree(checkpoint(shallow=True), tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(sampling))
    command = ["say", "Hi.", "--model", str(model), "--device", "cpu"]
    assert main(command) == 0
    unseeded = capsysbinary.readouterr()
    explanation, last = unseeded.err.decode().splitlines()
    assert reason in explanation and "another --seed" in explanation
    seed = re.fullmatch(r".* real-time factor \S+, seed (\d+)", last)
    assert seed is not None
    assert main([*command, "--seed", seed[1]]) == 0
    assert_same_speech(capsysbinary.readouterr().out, unseeded.out)


@contextmanager
def synthesising(output: Path, text: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that synthesises to a file, after it has written the first chunk."""
    command = [sys.executable, "-c", ANNOUNCING, "say", text, "-o", str(output)]
    pipe = subprocess.PIPE
    # Background jobs of a shell script ignore interrupts, and so do their children.
    reset_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=reset_sigint
    ) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            if text == "-":
                process.stdin.write(b"Once upon a t\xc3")
                process.stdin.flush()
            assert process.stdout.readline() == b"written\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "text", ["A long text that goes on and on. " * 400, "-"], ids=["known", "live"]
)
def test_interrupt_keeps_the_written_audio(tmp_path: Path, text: str) -> None:
    output = tmp_path / "a.wav"
    with synthesising(output, text) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130  # with standard input still open
        assert process.stderr is not None
        error = process.stderr.read()
    assert b"interrupted" in error and b"Traceback" not in error
    assert soundfile.info(output).frames >= 1920


def buffered() -> dict[str, str]:
    """The environment, with buffered output that Python flushes at exit, as for most users."""
    return os.environ | {"PYTHONUNBUFFERED": ""}


def shell(command: str) -> Run:
    line = command.replace("COMMAND", f"{sys.executable} -m megakernel_tts")
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, timeout=TIMEOUT_S, env=buffered()
    )


@pytest.mark.parametrize("arguments", [["say", "hello to you. "], ["voices"]])
def test_pipe_that_is_closed_before_output_gives_no_traceback(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        run = subprocess.run(
            [sys.executable, "-m", "megakernel_tts", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            env=buffered(),
        )
    assert run.returncode == 1
    assert b"Traceback" not in run.stderr and b"Exception" not in run.stderr


def test_full_device_is_an_error_without_traceback() -> None:
    run = shell("COMMAND voices > /dev/full")
    assert run.returncode == 1
    assert b"No space left" in run.stderr.splitlines()[-1] and b"Exception" not in run.stderr


def test_closed_standard_streams_do_not_change_the_output(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = tmp_path / "a.wav"
    assert main(["say", "hi", "--seed", "1"]) == 0
    expected = capsysbinary.readouterr().out
    assert main(["voices"]) == 0
    assert shell("COMMAND voices 2>&-").stdout == capsysbinary.readouterr().out != b""
    # Standard error is a pipe that nothing reads, and then closed as well.
    unread = f"COMMAND say hi --seed 1 -o {output} <&- 2>&1 >&- | true; exit ${{PIPESTATUS[0]}}"
    for command in (unread, f"COMMAND say hi --seed 1 -o {output} <&- >&- 2>&-"):
        output.unlink(missing_ok=True)
        assert shell(command).returncode == 0
        with wave.open(str(output)) as file:
            assert_same_speech(file.readframes(1 << 20), expected)


def test_closed_standard_streams_are_opened_or_reported() -> None:
    opened = "from megakernel_tts.cli.console import open_closed_streams as opened; opened()"
    check = "import os; [os.fstat(number) for number in range(3)]"
    assert shell(f"{sys.executable} -c '{opened}; {check}' <&- >&- 2>&-").returncode == 0
    for command in ("COMMAND say hi >&-", "COMMAND say - <&-"):
        run = shell(command)
        assert run.returncode == 2
        assert b" is closed; " in run.stderr and b"Traceback" not in run.stderr


def test_voices_lists_voices_with_languages(
    capsys: pytest.CaptureFixture[str], checkpoint: Callable[..., Path]
) -> None:
    assert main(["voices"]) == 0
    voices = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert voices == dict.fromkeys(("clara", "henry", "olivia", "lucia"), "english, spanish")
    assert main(["voices", "--model", str(checkpoint())]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["serena", "ryan", "eric", "dylan"]
    assert "english" in lines[0] and "sichuan_dialect, chinese" in lines[2]
    assert main(["voices", "--model", str(checkpoint("base"))]) == 0
    assert "--clone" in capsys.readouterr().out
    assert main(["voices", "--model", str(checkpoint("voice_design", "1b7"))]) == 0
    assert "--instruct" in capsys.readouterr().out


def test_doctor_summary_agrees_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = main(["doctor"]), capsys.readouterr().out
    assert "can synthesise speech." in report if code == 0 else "MISSING" in report


def test_help_and_version_exit_with_success(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["say", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    assert megakernel_tts.__version__ in capsys.readouterr().out


def test_help_and_the_list_of_voices_do_not_import_torch() -> None:
    check = (
        "import sys; from megakernel_tts.cli.main import main\n"
        "main(['voices'])\n"
        "try: main(['say', '--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, env=os.environ)
    assert run.returncode == 0


def test_file_with_the_name_of_a_voice_does_not_hide_the_voice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_speech: None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clara").touch()
    assert main(["say", "Hi", "--voice", "clara", "-o", "x.wav"]) == 0


# Runs the command, and interrupts it when it imports a module, or at its end.
INTERRUPTED = """
import atexit, os, runpy, signal, sys

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            interrupt()

module, sys.argv = sys.argv[1], sys.argv[1:]
sys.meta_path.insert(0, Finder())
if module == "exit":
    atexit.register(interrupt)
runpy.run_module("megakernel_tts", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "module",
    ["megakernel_tts.cli.main", "megakernel_tts.cli.say", "argparse", "numpy", "torch", "exit"],
)
def test_interrupt_outside_of_the_command_gives_no_traceback(module: str, tmp_path: Path) -> None:
    """An import may hide the interrupt, and at exit Python reports it with a traceback."""
    output = str(tmp_path / "z.wav")
    command = [sys.executable, "-c", INTERRUPTED, module, "say", "Hi", "-o", output, "--seed", "1"]
    reset_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    run = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, preexec_fn=reset_sigint)
    assert run.returncode == -signal.SIGINT
    assert b"Traceback" not in run.stderr
    assert (b"s of audio" in run.stderr) == (module == "exit")
