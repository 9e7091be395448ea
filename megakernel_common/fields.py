"""Checked reading of untrusted JSON and text files."""

import json
from pathlib import Path
from typing import Any

from megakernel_common.errors import CheckpointError

_MAX_INTEGER = 1 << 20  # far above every size of a released model; bounds what a bad file allocates
_MAX_FILE_BYTES = 16 << 20
_MAX_LIST = 16  # entries


class Fields:
    """A JSON object. Every read is checked, and every error names the file and the field."""

    def __init__(self, values: Any, file: Path, path: str = "") -> None:
        """Wraps a parsed JSON value.

        Args:
            values: The value, which must be an object.
            file: Where it was read, for messages.
            path: Its place in the file: empty, or names that end in a dot.

        Raises:
            CheckpointError: The value is not an object.
        """
        if not isinstance(values, dict):
            where = f"{file}: {path or 'the file'}"
            raise CheckpointError(f"{where} must be a JSON object, found {_shown(values)}.")
        self.values: dict[str, Any] = values
        self.file = file
        self.path = path

    def _get(self, name: str, expected: str) -> Any:
        if name not in self.values:
            raise CheckpointError(
                f"{self.file}: the field {self.path}{name} is missing; expected {expected}."
            )
        return self.values[name]

    def invalid(self, name: str, expected: str) -> CheckpointError:
        """The error for a field whose value is not as expected."""
        found = _shown(self.values.get(name))
        return CheckpointError(f"{self.file}: {self.path}{name} is {found}; expected {expected}.")

    def section(self, name: str) -> "Fields":
        """The nested object `name`."""
        return Fields(self._get(name, "a JSON object"), self.file, f"{self.path}{name}.")

    def integer(
        self,
        name: str,
        default: int | None = None,
        minimum: int = 1,
        maximum: int = _MAX_INTEGER,
    ) -> int:
        """A whole number from `minimum` to `maximum`."""
        expected = f"a whole number from {minimum} to {maximum}"
        value = self._get(name, expected) if default is None else self.values.get(name, default)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not minimum <= value <= maximum:
            raise self.invalid(name, expected)
        return value

    def number(self, name: str) -> float:
        """A positive finite number."""
        value = self._get(name, "a positive number")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 1e-12 <= value <= 1e12):  # false for NaN
            raise self.invalid(name, "a positive finite number")
        return float(value)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of the strings `choices`."""
        expected = "one of " + ", ".join(choices)
        if self._get(name, expected) not in choices:
            raise self.invalid(name, expected)
        return self.values[name]

    def integers(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A short list of positive whole numbers."""
        expected = "a short list of positive whole numbers"
        value = self._get(name, expected) if default is None else self.values.get(name, default)
        is_list = isinstance(value, list | tuple) and 0 < len(value) <= _MAX_LIST
        if not is_list or not all(type(v) is int and 0 < v <= _MAX_INTEGER for v in value):
            raise self.invalid(name, expected)
        return tuple(value)

    def ids(self, name: str, below: int) -> dict[str, int]:
        """An object of names and ids below a limit; the names are converted to lower case."""
        expected = f"an object of names, distinct in lower case, and ids below {below}"
        value = self._get(name, expected)
        is_valid = isinstance(value, dict) and all(
            type(v) is int and 0 <= v < below for v in value.values()
        )
        if not is_valid or len({key.lower() for key in value}) < len(value):
            raise self.invalid(name, expected)
        return {key.lower(): index for key, index in value.items()}

    def require(self, **implemented: Any) -> None:
        """Refuses fields whose value is present and differs from the implemented one."""
        for name, value in implemented.items():
            found = self.values.get(name, value)
            if found != value or type(found) is not type(value):  # True == 1
                raise self.invalid(name, f"{value!r}, the only one implemented")


def _shown(value: Any) -> str:
    text = ""
    try:
        for part in json.JSONEncoder().iterencode(value):  # of a YAML alias, parts may not end
            text += part
            if len(text) > 60:
                return text[:57] + "..."
    except RecursionError:
        return "a deeply nested value"
    except (TypeError, ValueError):  # YAML has dates, sets, bytes and circular values
        return f"a value of type {type(value).__name__}"
    return text


def read_json(file: Path) -> Any:
    """Reads a small JSON file.

    Raises:
        CheckpointError: See `read_text`; or the content is not JSON.
    """
    text = read_text(file)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}).") from error


def read_text(file: Path) -> str:
    """Reads a small text file.

    Raises:
        CheckpointError: It is missing, not a regular file, too large, or not UTF-8.
    """
    try:
        check_regular(file)
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise CheckpointError(
                f"{file}: larger than {_MAX_FILE_BYTES} bytes, so not a file of a checkpoint."
            )
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: the file is missing from the checkpoint.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as UTF-8 text ({error}).") from error


def check_regular(file: Path) -> None:
    """Refuses folders, pipes, sockets and devices; opening a pipe would block for ever.

    Raises:
        CheckpointError: The path exists and is not a regular file.
    """
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file}: not a regular file; the checkpoint is damaged.")
