"""Values of JSON and YAML files replaced by values of other types and ranges."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

JsonPath = tuple[str | int, ...]

MISSING = object()
JUNK = [
    MISSING, None, True, False, -1, 0, 5, 0.5, -1e300, 10**30, 10**4000, float("nan"), "", "x",
    "\x00", "\ud800", [], [[]], [None], [5], [0.5], ["x"], [{}], [10**9] * 20, {}, {"x": None},
    {"x": 5}, {"x": "x"}, {"x": []}, {"rope_type": []},
]  # fmt: skip
MAX_ENTRIES = 200  # of an object whose entries are all replaced; of others the first four are


def paths(value: Any, path: JsonPath = ()) -> Iterator[JsonPath]:
    """The paths of a JSON value, without its root."""
    keys = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = list(range(len(value)))
    for key in keys if len(keys) <= MAX_ENTRIES else keys[:4]:
        yield (*path, key)
        yield from paths(value[key], (*path, key))


def changed(content: Any, path: JsonPath, value: object) -> Any:
    """A JSON value with another value at a path; what is not on the path is shared."""
    content, (key, *rest) = copy.copy(content), path
    if rest:
        content[key] = changed(content[key], tuple(rest), value)
    elif value is not MISSING:
        content[key] = value
    else:
        with contextlib.suppress(KeyError):
            del content[key]
    return content
