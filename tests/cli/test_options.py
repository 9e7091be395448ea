"""Options that are refused: empty values, seeds, output files, folders given as voices."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megakernel_tts import TTS
from megakernel_tts.cli.main import main

EMPTY = {
    "say": ["-o", "--file", "--voice", "--clone", "--ref-text", "--save-voice", "--pronunciations"],
    "calibrate": ["-o", "--sentences", "--truth", "--voice"],
    "bench": ["--json", "--plot"],
}


@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for command in EMPTY for option in EMPTY[command]]
)
def test_empty_option_is_refused(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "x", option, ""])
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}" in line.replace("-f/", "") and "the value is empty" in line


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that loads a model."""
    monkeypatch.setattr(TTS, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    load = "megakernel_tts.calibration.calibrate.load_checkpoint"
    monkeypatch.setattr(load, lambda *_: pytest.fail("a model was loaded"))


@pytest.mark.parametrize("seed", ["-1", str(1 << 64)])
def test_seed_out_of_range_is_a_usage_error_before_the_model_is_loaded(
    no_model: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: str
) -> None:
    assert main(["say", "x", "-o", str(tmp_path / "z.wav"), "--seed", seed]) == 2
    error = capsys.readouterr().err
    assert f"--seed is {seed}; it must be from 0 to 2^64 - 1" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speed", "3"], "--speed is 3.0; it must be a number from 0.5 to 2"),
        (["--speed", "nan"], "--speed is nan"),
        (["--pronunciations", "{table}"], "table.toml: The entry 'two words'"),
    ],
)
def test_invalid_controls_are_usage_errors_before_the_model_is_loaded(
    no_model: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    table = tmp_path / "table.toml"
    table.write_text("'two words' = 'x'\n", encoding="utf-8")
    arguments = [option.format(table=table) for option in options]
    assert main(["say", "x", "-o", str(tmp_path / "z.wav"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        ("say", "-o", "x.wav"),
        ("say", "--save-voice", "x.safetensors"),
        ("calibrate", "-o", "x.json"),
        ("bench", "--json", "x.json"),
        ("bench", "--plot", "x.png"),
    ],
)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.mkdir, r"is a folder|is not a regular file"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/null"), r"is a symbolic link|is not a regular file"),
    ],
    ids=["folder", "pipe", "link"],
)
def test_invalid_output_is_refused_before_the_model_is_loaded(
    no_model: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    option: str,
    name: str,
    make: Callable[[Path], object],
    message: str,
) -> None:
    make(tmp_path / name)
    arguments = [command, "demo", option, str(tmp_path / name)]
    if option == "--save-voice":
        arguments += ["--clone", "me.wav", "-o", str(tmp_path / "z.wav")]
    assert main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["folder", "folder.safetensors"])
def test_folder_is_no_voice_file(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    voice = tmp_path / name
    voice.mkdir()
    output = tmp_path / "z.wav"
    arguments = ["say", "x", "-o", str(output), "--voice", str(voice)]
    assert main([*arguments, "--model", str(checkpoint("base"))]) == 2
    assert f"{voice} is a folder" in capsys.readouterr().err
    assert not output.exists()
