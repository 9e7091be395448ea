"""`megakernel-tts check`: compares a recogniser with transformers, token by token."""

import argparse

from megakernel_tts.cli.console import nonempty, raise_interrupts
from megakernel_tts.cli.transcribe import add_request_options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    parser.add_argument(
        "model",
        type=nonempty,
        metavar="MODEL",
        help="a recogniser: a folder that transformers saved, or a hub id of one",
    )
    parser.add_argument("file", type=nonempty, metavar="FILE", help="a recording")
    add_request_options(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the tokens of both, one line each, and whether they are equal.

    Returns:
        0: the tokens are equal, 1: they differ.

    Raises:
        MegakernelTTSError: The model or the recording cannot be used, or transformers is missing.
    """
    from megakernel_stt.comparison import compare

    raise_interrupts()
    result = compare(options.model, options.file, options.language, options.lookahead)
    print("    seconds     ours   theirs  text")
    for i in range(max(len(result.ours), len(result.theirs))):
        ours = result.ours[i] if i < len(result.ours) else None
        theirs = result.theirs[i] if i < len(result.theirs) else None
        equal = ours is not None and ours.id == theirs
        columns = (
            " " if equal else "!",
            "" if ours is None else f"{ours.start:.2f}",
            "-" if ours is None else ours.id,
            "-" if theirs is None else theirs,
            repr(ours.text) if ours is not None else result.their_texts[i],
        )
        print("{} {:>9} {:>8} {:>8}  {}".format(*columns))
    first = result.first_difference
    if first is None:
        print(f"All {len(result.ours)} tokens are equal.")
        return 0
    print(
        f"Token {first} differs: this package has {len(result.ours)}, transformers has "
        f"{len(result.theirs)}."
    )
    return 1
