"""What the fuzzers and the soak of the server share: odd values, reports, logged errors."""

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

_DROPPED_SHARE, _CHANGED_SHARE = 0.1, 0.2  # of the fields of a message

_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**64, 10**400, -0.0, 1e308, float("nan"), float("inf"),
    "", " ", "a", "0", "\0", "\ud800", "\U0001f469\u200d\U0001f467", "<break time='9s'/>",
    "x" * 5000,
    [], [None], ["a", 1], {}, {"id": None}, {"a": {"b": []}},
]  # fmt: skip
NO_MESSAGES: list[str | bytes] = [
    "", "{", "[]", "null", "3", '"a"', "\0", "{}{}", "[" * 2000, '{"a":' * 2000, "1" * 10_000, b"",
    b"\xff\xfe", b"{}", bytes(5000),
]  # fmt: skip


@dataclass
class FuzzReport:
    """What was sent and answered.

    Attributes:
        http: Replies by status.
        messages: Messages and events sent.
        events: Events received, by type and code of the error.
        sockets: Sockets opened.
        failures: What was wrong, with the first case of each kind.
        seconds: Duration.
        rss_growth_mb: Growth of resident memory from the first fifth of the messages to the end.
    """

    http: Counter[int] = field(default_factory=Counter)
    messages: int = 0
    events: Counter[str] = field(default_factory=Counter)
    sockets: int = 0
    failures: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0
    rss_growth_mb: float = 0.0


class FuzzConnection(ABC):
    """A connection to the server, and a task that reads all that it receives."""

    def __init__(self, report: FuzzReport) -> None:
        """Starts to read.

        Args:
            report: Counts what is received.
        """
        self._report = report
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for kind in self.received():
            self._report.events[kind] += 1

    @abstractmethod
    def received(self) -> AsyncIterator[str]:
        """The kinds of what is received, until the connection closes."""

    @abstractmethod
    def abort(self) -> None:
        """Ends the connection without a farewell."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Ends the connection properly, unless it has ended."""

    @property
    def closed(self) -> bool:
        """Whether the server has closed the connection."""
        return self._reading.done()

    async def close(self, *, abort: bool = False) -> None:
        """Closes the connection, properly or not."""
        if abort:
            self.abort()
        await self.disconnect()
        await self._reading


def change(rng: random.Random, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drops fields or gives them odd values."""
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        draw = rng.random()
        if draw < _DROPPED_SHARE:
            continue
        if draw < _DROPPED_SHARE + _CHANGED_SHARE:
            odd = rng.choice(_VALUES)
            value = change(rng, value) if isinstance(value, dict) and rng.random() < 0.5 else odd
        changed[name] = value
    return changed


def rss_mb() -> float:
    """Resident memory of this process, in MiB."""
    return psutil.Process().memory_info().rss / 2**20


class _Errors(logging.Handler):
    """Records the errors that the server logs as failures."""

    def __init__(self, failures: dict[str, str]) -> None:
        super().__init__(logging.ERROR)
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        """Records the first error of a kind."""
        text = self.format(record)
        self._failures.setdefault(f"log: {text.splitlines()[-1]}", text[-2000:])


@contextmanager
def errors_in(failures: dict[str, str]) -> Iterator[None]:
    """Adds what is logged as an error until the block ends."""
    handler = _Errors(failures)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
