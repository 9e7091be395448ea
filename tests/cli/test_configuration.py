import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megakernel_tts.cli.configuration import Configuration, Setting
from megakernel_tts.cli.console import UsageError


def resolve(
    arguments: Sequence[str] = (), environment: dict[str, str] | None = None
) -> dict[str, Setting]:
    """Options of a command with one option of each kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--queue-timeout", type=float, default=5.0)
    parser.add_argument("--voice", action="append", default=[])
    parser.add_argument("--no-auth", action="store_true")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--key-file", type=Path)
    configuration = Configuration(parser)
    given = parser.parse_args(arguments)
    assert given.configuration is configuration
    return configuration.resolve(given, environment or {})


def values(settings: dict[str, Setting]) -> dict[str, Any]:
    return {name: setting.value for name, setting in settings.items()}


def test_the_command_line_precedes_the_environment_and_that_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("port = 1\nqueue-timeout = 1\nlog-format = 'json'\n", encoding="utf-8")
    environment = {"MEGAKERNEL_TTS_PORT": "2", "MEGAKERNEL_TTS_QUEUE_TIMEOUT": "2", "HOME": "x"}
    settings = resolve(["--config", str(file), "--port", "3"], environment)
    assert settings["port"] == Setting(3, "command line")
    assert settings["queue-timeout"] == Setting(2.0, "environment")
    assert settings["log-format"] == Setting("json", "file")
    assert settings["no-auth"] == Setting(False, "default")


def test_without_a_source_all_options_have_their_defaults() -> None:
    assert values(resolve()) == {
        "port": 8000,
        "queue-timeout": 5.0,
        "voice": [],
        "no-auth": False,
        "log-format": "text",
        "key-file": None,
    }


def test_every_kind_of_option_can_be_set_in_every_source(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        "port = 1\nqueue-timeout = 0.5\nvoice = ['a=b', 'c=d']\nno-auth = true\n"
        "log-format = 'json'\nkey-file = 'keys'\n",
        encoding="utf-8",
    )
    environment = {
        "MEGAKERNEL_TTS_PORT": "1",
        "MEGAKERNEL_TTS_QUEUE_TIMEOUT": "0.5",
        "MEGAKERNEL_TTS_VOICE": "a=b,c=d",
        "MEGAKERNEL_TTS_NO_AUTH": "true",
        "MEGAKERNEL_TTS_LOG_FORMAT": "json",
        "MEGAKERNEL_TTS_KEY_FILE": "keys",
    }
    arguments = "--port 1 --queue-timeout 0.5 --voice a=b --voice c=d --no-auth --log-format json"
    expected = values(resolve([*arguments.split(), "--key-file", "keys"]))
    assert values(resolve(environment=environment)) == expected
    assert values(resolve(["--config", str(file)])) == expected
    assert values(resolve(environment={"MEGAKERNEL_TTS_CONFIG": str(file)})) == expected


def test_a_list_replaces_that_of_another_source() -> None:
    settings = resolve(["--voice", "a=b"], {"MEGAKERNEL_TTS_VOICE": "c=d"})
    assert settings["voice"].value == ["a=b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ports = 1", "ports is unknown; did you mean port?"),
        ("queue_timeout = 1", "did you mean queue-timeout?"),
        ("config = 'other'", "config is unknown"),
        ("port = 'x'", "whole number"),
        ("port = 1.5", "whole number"),
        ("port = true", "a string or a number"),
        ("port = [1]", "a string or a number"),
        ("no-auth = 'yes'", "true or false"),
        ("voice = 'a=b'", "list of strings"),
        ("voice = [1]", "list of strings"),
        ("log-format = 'xml'", "choose one of: text, json"),
        ("port", "no TOML"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        resolve(["--config", str(file)])
    assert message in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PROT", "1", "did you mean MEGAKERNEL_TTS_PORT?"),
        ("UNRELATED", "1", "known are: MEGAKERNEL_TTS_CONFIG"),
        ("PORT", "x", "whole number"),
        ("QUEUE_TIMEOUT", "soon", "must be a number"),
        ("NO_AUTH", "maybe", "true or false"),
        ("LOG_FORMAT", "xml", "choose one of: text, json"),
    ],
)
def test_invalid_variables_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(environment={f"MEGAKERNEL_TTS_{name}": value})
    assert message in str(caught.value) and f"MEGAKERNEL_TTS_{name}" in str(caught.value)
