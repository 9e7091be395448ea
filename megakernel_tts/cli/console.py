"""Values of options, interrupts, and standard streams, which may be closed or broken."""

import argparse
import codecs
import gc
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PORTION_BYTES = 4096  # of standard input, read at a time


class UsageError(Exception):
    """The options or the input of a command are invalid."""


def nonempty(value: str) -> str:
    """Type of an option with a string that may not be empty."""
    if not value:
        raise argparse.ArgumentTypeError("the value is empty; give one or leave the option out")
    return value


def file_path(value: str) -> Path:
    """Type of an option that names a file."""
    return Path(nonempty(value))


def positive_integer(value: str) -> int:
    """Type of an option with a whole number of 1 or more."""
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number of 1 or more")
    return int(value)


def positive_integers(value: str) -> tuple[int, ...]:
    """Type of an option with such numbers, separated by commas; repeated ones are dropped."""
    return tuple(dict.fromkeys(positive_integer(count) for count in value.split(",")))


def positive_number(value: str) -> float:
    """Type of an option with a number above 0."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number above 0")
    return number


def positive_numbers(value: str) -> tuple[float, ...]:
    """Type of an option with such numbers, separated by commas; repeated ones are dropped."""
    return tuple(dict.fromkeys(positive_number(number) for number in value.split(",")))


@contextmanager
def permanent_imports() -> Iterator[None]:
    """Keeps what is imported in the block out of garbage collection until the process ends.

    Collections would visit every object of torch: they take a fifth of a short command's CPU time,
    and a full one stops all threads of a server for 0.1 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def raise_interrupts() -> None:
    """Makes an interrupt raise KeyboardInterrupt, which a command calls after its imports.

    Until then an interrupt ends the process (see `__main__`): an interrupted import of an
    extension may hide the exception and fail later.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_closed_streams() -> None:
    """Opens the null device for closed standard streams, so that no file gets descriptors 0 to 2.

    `sys.stdin` and `sys.stdout` remain None if they were closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, `number`
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
    """Yields the text of standard input as it arrives; reads no more than the caller takes.

    Raises:
        UsageError: The input is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_read = 0  # bytes
    while True:
        # Python's buffered reader has a lock that a thread blocked in it would hold at exit.
        data = os.read(sys.stdin.fileno(), _PORTION_BYTES)
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
