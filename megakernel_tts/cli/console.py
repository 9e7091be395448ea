"""The standard streams as a program finds them: closed, broken, or still being written."""

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import suppress


class UsageError(Exception):
    """What was given to the command cannot be meant."""


def fill_closed_streams() -> None:
    """Gives closed standard streams the null device: no other file may take their numbers.

    `sys.stdin` and `sys.stdout` stay None, which tells that they were closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    if sys.stderr is None:  # what is printed to None goes to standard output
        sys.stderr = open(os.devnull, "w")


def tell(message: str) -> None:
    """Says something on standard error, if anybody listens."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def drop_unwritten() -> None:
    """Drops what the standard streams no longer take, or the interpreter fails at exit over it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def arriving_text() -> Iterator[str]:
    """Standard input as it arrives.

    Raises:
        UsageError: It is no UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    while True:
        # Not by way of Python's buffer: a thread that waits in it at exit would hold its lock.
        data = os.read(sys.stdin.fileno(), 1 << 16)
        before = read - len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            place = before + error.start
            raise UsageError(
                f"standard input is not UTF-8 text: {error.reason} at byte {place}"
            ) from None
        read += len(data)
        yield text
        if not data:
            return
