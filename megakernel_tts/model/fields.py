"""Reading JSON from strangers: every read is checked, every error names file and field."""

import json
from pathlib import Path
from typing import Any

from megakernel_tts.errors import CheckpointError

_LARGEST = 1 << 20  # no size in any released model comes near it; a hostile file stops here
_LARGEST_FILE = 16 << 20  # bytes


class Fields:
    """A JSON object whose every read is checked and whose every error names file and field."""

    def __init__(self, values: Any, file: Path, path: str = "") -> None:
        if not isinstance(values, dict):
            place = f"{file}: {path or 'the file'}"
            raise CheckpointError(f"{place} must be a JSON object, found {_shown(values)}.")
        self.values: dict[str, Any] = values
        self.file = file
        self.path = path

    def _get(self, name: str, expected: str) -> Any:
        if name not in self.values:
            raise CheckpointError(
                f"{self.file}: the field {self.path}{name} is missing; expected {expected}."
            )
        return self.values[name]

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """The error of a field that holds something else than expected."""
        found = _shown(self.values.get(name))
        return CheckpointError(f"{self.file}: {self.path}{name} is {found}; expected {expected}.")

    def section(self, name: str) -> "Fields":
        """A nested object."""
        return Fields(self._get(name, "a JSON object"), self.file, f"{self.path}{name}.")

    def integer(
        self, name: str, default: int | None = None, least: int = 1, most: int = _LARGEST
    ) -> int:
        """A whole number within bounds."""
        expected = f"a whole number from {least} to {most}"
        value = self._get(name, expected) if default is None else self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, expected)
        return value

    def number(self, name: str) -> float:
        """A positive finite number."""
        value = self._get(name, "a positive number")
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not (real and 1e-12 <= value <= 1e12):  # no NaN passes a comparison
            raise self.wrong(name, "a positive finite number")
        return float(value)

    def word(self, name: str, choices: tuple[str, ...]) -> str:
        """One of a few words."""
        expected = "one of " + ", ".join(choices)
        if self._get(name, expected) not in choices:
            raise self.wrong(name, expected)
        return self.values[name]

    def integers(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A short list of positive whole numbers."""
        expected = "a short list of positive whole numbers"
        value = self._get(name, expected) if default is None else self.values.get(name, default)
        ok = isinstance(value, list | tuple) and 0 < len(value) <= 16
        if not ok or not all(type(v) is int and 0 < v <= _LARGEST for v in value):
            raise self.wrong(name, expected)
        return tuple(value)

    def ids(self, name: str, below: int) -> dict[str, int]:
        """An object of names and ids; the names in lower case."""
        expected = f"an object of names and ids below {below}"
        value = self._get(name, expected)
        ok = isinstance(value, dict) and all(
            type(v) is int and 0 <= v < below for v in value.values()
        )
        if not ok:
            raise self.wrong(name, expected)
        return {key.lower(): index for key, index in value.items()}

    def must_be(self, **fixed: Any) -> None:
        """Refuses a value under which the network would compute something else."""
        for name, value in fixed.items():
            if name in self.values and self.values[name] != value:
                raise self.wrong(name, f"{value!r}, the only one implemented")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 60 else text[:57] + "..."


def read_json(file: Path) -> Any:
    """Reads a small JSON file.

    Raises:
        CheckpointError: As `read_text`, or it is no JSON.
    """
    text = read_text(file)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}).") from error


def read_text(file: Path) -> str:
    """Reads a small text file.

    Raises:
        CheckpointError: It is missing, no regular file, larger than any real one, or no UTF-8.
    """
    try:
        check_regular(file)
        if file.stat().st_size > _LARGEST_FILE:
            raise CheckpointError(f"{file}: larger than {_LARGEST_FILE} bytes, so none of ours.")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: the file is missing from the checkpoint.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as UTF-8 text ({error}).") from error


def check_regular(file: Path) -> None:
    """Refuses what stands in a file's place: opening a pipe would wait for ever.

    Raises:
        CheckpointError: It exists and is a folder, a pipe, a socket or a device.
    """
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file}: is no regular file; the checkpoint is damaged.")
