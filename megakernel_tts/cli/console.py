"""Standard input and output, which may be closed, broken or still being written."""

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import suppress


class UsageError(Exception):
    """The options or the input of a command are invalid."""


def open_closed_streams() -> None:
    """Opens the null device for closed standard streams, so that no other file gets their numbers.

    `sys.stdin` and `sys.stdout` remain None if they were closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stderr is None:  # print(file=None) would write to standard output
        sys.stderr = open(os.devnull, "w")


def print_status(message: str) -> None:
    """Prints a message to standard error; a closed or broken stream is ignored."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def discard_unwritten_output() -> None:
    """Discards buffered output of broken streams; its flush at exit would raise an exception."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def arriving_text() -> Iterator[str]:
    """Yields the text of standard input as it arrives.

    Raises:
        UsageError: The input is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_read = 0  # bytes
    while True:
        # Python's buffered reader has a lock that a thread blocked in it would hold at exit.
        data = os.read(sys.stdin.fileno(), 1 << 16)
        start = num_read - len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"standard input is not UTF-8 text: {error.reason} at byte {start + error.start}"
            ) from None
        num_read += len(data)
        yield text
        if not data:
            return
