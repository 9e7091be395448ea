"""Keys of clients with their limits, and the file that holds them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import IntEnum
from pathlib import Path
from typing import Any


class Priority(IntEnum):
    """Classes of requests, the most urgent first.

    `LIVE` speech has a listener who waits for it. `PREFETCH` speech will be needed soon. `BATCH`
    speech is for later.
    """

    LIVE = 0
    PREFETCH = 1
    BATCH = 2

    @classmethod
    def parse(cls, name: object) -> "Priority":
        """The class of a name.

        Raises:
            ValueError: There is no such class.
        """
        for priority in cls:
            if name == priority.name.lower():
                return priority
        known = ", ".join(priority.name.lower() for priority in cls)
        raise ValueError(f"priority is {str(name)[:100]!r}; choose one of: {known}.")


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key and the limits of the clients that send it.

    Attributes:
        name: Its name in logs and metrics.
        key: The secret.
        priority: Class of its requests, of which a request may name a lower one; None for no limit.
        streams: Streams that may be open at once; None for no limit.
        characters_per_minute: Characters of text; None for no limit.
        requests_per_minute: Requests for speech; None for no limit.
    """

    name: str
    key: str = field(repr=False)
    priority: Priority | None = None
    streams: int | None = None
    characters_per_minute: int | None = None
    requests_per_minute: int | None = None

    def __post_init__(self) -> None:
        if not (self.name and self.name.isprintable()):
            raise ValueError(f"name is {self.name!r}; it must be printable text.")
        if not self.key or not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise ValueError(f"The key of {self.name} must be printable ASCII without spaces.")
        for limit in ("streams", "characters_per_minute", "requests_per_minute"):
            value = getattr(self, limit)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{limit} is {value!r}; it must be a whole number above 0.")


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """Reads keys from a TOML file with a table `[[key]]` for each, whose fields are `ApiKey`'s.

    Args:
        path: The file.

    Raises:
        ValueError: It is no TOML, holds no key, or a key has an invalid or unknown field, or a name
            or secret of another one.
        OSError: It cannot be read.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        tables = document.pop("key", [])
        if document:
            raise ValueError(f"{next(iter(document))} is unknown; write a table [[key]] for a key.")
        if not isinstance(tables, list) or not tables:
            raise ValueError("there is no key; write a table [[key]] with name and key for each.")
        keys = tuple(map(_parse_key, tables))
        for name in ("name", "key"):
            if len({getattr(key, name) for key in keys}) < len(keys):
                raise ValueError(f"two keys have the same {name}.")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return keys


def _parse_key(table: Any) -> ApiKey:
    if not isinstance(table, Mapping):
        raise ValueError("key is no table; write [[key]] on a line, and its fields below.")
    known = [each.name for each in fields(ApiKey)]
    for name in table:
        if name not in known:
            guess = get_close_matches(name, known, 1)
            hint = f"did you mean {guess[0]}?" if guess else f"known are: {', '.join(known)}."
            raise ValueError(f"a key has the unknown field {name}; {hint}")
    for name in ("name", "key"):
        if not isinstance(table.get(name), str):
            raise ValueError(f"each [[key]] needs a {name}, as a string.")
    values = dict(table)
    if "priority" in values:
        values["priority"] = Priority.parse(values["priority"])
    return ApiKey(**values)
