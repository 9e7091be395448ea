"""The options of `megakernel-tts bench`."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        model: A model's name, unless random weights are measured.
        random_weights: `0.6B` or `1.7B`, or None.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        runs: Requests of which the time to the first chunk is taken.
        chunks: Frames of a chunk, one after the other.
        streams: At a time, one after the other.
        layout: Where the text goes in the prompt.
        peer: Whether other programs are measured, too.
    """

    model: str
    random_weights: str | None
    device: str
    runs: int
    chunks: tuple[int, ...]
    streams: tuple[int, ...]
    layout: Literal["full", "streaming"]
    peer: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "model",
        nargs="?",
        default="demo",
        metavar="MODEL",
        help="demo (the default), a folder or a hub id",
    )
    models.add_argument(
        "--random-weights",
        choices=("0.6B", "1.7B"),
        help="a CustomVoice model of this size, its weights drawn at random (2 to 4 GB of "
        "temporary files): it takes the time, and makes noise, 50 frames of it at most",
    )
    parser.add_argument(
        "--runs",
        type=_whole_number,
        default=100,
        help="requests of which the time to the first chunk is taken (default: 100); the other "
        "figures are of fewer",
    )
    for name, meaning in (
        ("--chunks", "frames of a chunk"),
        ("--streams", "streams that begin together"),
    ):
        parser.add_argument(
            name,
            type=_whole_numbers,
            default=(1, 2, 4, 8),
            metavar="N,N",
            help=f"{meaning}, one figure for each (default: 1,2,4,8)",
        )
    parser.add_argument(
        "--layout",
        choices=("full", "streaming"),
        default="full",
        help="where the text goes: into the prompt (the default), as a text that is known, or a "
        "token beside each frame, as one that is still being written",
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw where the first chunk's time goes"
    )
    parser.add_argument(
        "--peer",
        action="store_true",
        help="measure faster-qwen3-tts and qwen-tts on the same model, where they are installed",
    )


def given(options: argparse.Namespace) -> Options:
    """What to measure, of all that was given."""
    return Options(
        options.model,
        options.random_weights,
        options.device,
        options.runs,
        options.chunks,
        options.streams,
        options.layout,
        options.peer,
    )


def _whole_number(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is no whole number of 1 or more")
    return int(value)


def _whole_numbers(value: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_whole_number(part) for part in value.split(",")))
