"""Options of a command from the command line, the environment and a file, in this precedence."""

import argparse
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from megakernel_tts.cli.console import UsageError, file_path

PREFIX = "MEGAKERNEL_TTS_"
_CONFIG = "config"
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

Source = Literal["default", "file", "environment", "command line"]


@dataclass(frozen=True)
class Setting:
    """The value of an option, and where it is from."""

    value: Any
    source: Source


class Configuration:
    """The options of a command, which may also be set in the environment or in a TOML file.

    The option `--max-queue` is the variable `MEGAKERNEL_TTS_MAX_QUEUE` and the field `max-queue`.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        """Takes over a parser with all of its options, and adds `--config`.

        From now on the parser's result holds only what is on the command line, and this object as
        `configuration`.
        """
        self._actions = {
            action.dest.replace("_", "-"): action
            for action in parser._actions
            if action.option_strings and action.dest != "help"
        }
        self._defaults = {name: action.default for name, action in self._actions.items()}
        for action in self._actions.values():
            action.default = argparse.SUPPRESS
        parser.add_argument(
            f"--{_CONFIG}",
            type=file_path,
            metavar="FILE",
            help="a TOML file with options (max-queue = 64); the environment "
            f"({PREFIX}MAX_QUEUE=64) and the command line have precedence over it",
        )
        parser.set_defaults(configuration=self)

    def resolve(
        self, given: argparse.Namespace, environment: Mapping[str, str]
    ) -> dict[str, Setting]:
        """Gives each option the value of the source that has precedence.

        Args:
            given: Result of the parser.
            environment: Environment variables.

        Raises:
            UsageError: A source has an unknown name or an invalid value.
            OSError: The file cannot be read.
        """
        variables = self._read_environment(environment)
        path = given.config or variables.pop(_CONFIG, None)
        settings = {name: Setting(value, "default") for name, value in self._defaults.items()}
        if path is not None:
            settings |= self._read_file(Path(path))
        for name, text in variables.items():
            value = self._parse_text(name, text, f"{PREFIX}{_variable(name)}")
            settings[name] = Setting(value, "environment")
        for name, action in self._actions.items():
            if action.dest in given:
                settings[name] = Setting(getattr(given, action.dest), "command line")
        return settings

    def _read_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        known = {_variable(name): name for name in (*self._actions, _CONFIG)}
        found: dict[str, str] = {}
        for variable, text in environment.items():
            if variable.startswith(PREFIX):
                name = variable.removeprefix(PREFIX)
                if name not in known:
                    hint = _hint(name, [*known], PREFIX)
                    raise UsageError(f"the environment variable {variable} is unknown; {hint}")
                found[known[name]] = text
        return found

    def _read_file(self, path: Path) -> dict[str, Setting]:
        try:
            fields = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} is no TOML file: {error}") from None
        settings: dict[str, Setting] = {}
        for name, value in fields.items():
            if name not in self._actions:
                raise UsageError(f"{path}: {name} is unknown; {_hint(name, [*self._actions])}")
            settings[name] = Setting(self._parse(name, value, f"{path}: {name}"), "file")
        return settings

    def _parse(self, name: str, value: Any, where: str) -> Any:
        """The value of a TOML field."""
        action = self._actions[name]
        if isinstance(action, argparse._AppendAction):
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise UsageError(f"{where} must be a list of strings")
            return [self._convert(action, each, where) for each in value]
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise UsageError(f"{where} must be true or false")
            return value
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UsageError(f"{where} must be a string or a number")
        return self._convert(action, str(value), where)

    def _parse_text(self, name: str, text: str, where: str) -> Any:
        """The value of an environment variable."""
        action = self._actions[name]
        if isinstance(action, argparse._AppendAction):
            return [self._convert(action, each, where) for each in text.split(",") if each]
        if action.nargs == 0:
            if text.lower() not in _BOOLEANS:
                raise UsageError(f"{where} is {text!r}; it must be true or false")
            return _BOOLEANS[text.lower()]
        return self._convert(action, text, where)

    @staticmethod
    def _convert(action: argparse.Action, text: str, where: str) -> Any:
        kind = action.type or str
        assert callable(kind)
        try:
            value = kind(text)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{where}: {error}") from None
        except ValueError:
            kind_name = {int: "whole number", float: "number"}.get(kind, "valid value")
            raise UsageError(f"{where} is {text!r}; it must be a {kind_name}") from None
        if action.choices is not None and value not in action.choices:
            choices = ", ".join(map(str, action.choices))
            raise UsageError(f"{where} is {text!r}; choose one of: {choices}")
        return value


def _variable(name: str) -> str:
    return name.replace("-", "_").upper()


def _hint(name: str, known: list[str], prefix: str = "") -> str:
    if guess := get_close_matches(name, known, 1):
        return f"did you mean {prefix}{guess[0]}?"
    return "known are: " + ", ".join(prefix + each for each in sorted(known))
