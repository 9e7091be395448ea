"""`megakernel-tts bench`: measures latency and speed of a model on this machine."""

import argparse
from importlib.util import find_spec

from megakernel_tts.cli.console import (
    UsageError,
    file_path,
    positive_integer,
    positive_integers,
    positive_number,
    positive_numbers,
    raise_interrupts,
)
from megakernel_tts.cli.output import check_writable


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
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
        help="a CustomVoice model of this size with random weights (2 to 4 GB of temporary files); "
        "its speed is that of the released model, its speech is noise of at most 50 frames",
    )
    parser.add_argument(
        "--runs",
        type=positive_integer,
        default=100,
        help="number of requests for the time to the first chunk (default: 100); other figures "
        "use fewer",
    )
    for name, meaning in (
        ("--chunks", "frames per chunk"),
        ("--streams", "number of streams that begin at the same time"),
    ):
        parser.add_argument(
            name,
            type=positive_integers,
            default=(1, 2, 4, 8),
            metavar="N,N",
            help=f"{meaning}; every value is measured (default: 1,2,4,8)",
        )
    parser.add_argument(
        "--rate",
        type=positive_numbers,
        default=(),
        metavar="R,R",
        help="also measure requests of 4 s of speech that arrive at random, R per second; as many "
        "as the largest number of --streams speak at once",
    )
    parser.add_argument(
        "--duration",
        type=positive_number,
        default=60.0,
        metavar="SECONDS",
        help="time in which the requests of --rate arrive (default: 60)",
    )
    parser.add_argument(
        "--layout",
        choices=("full", "streaming"),
        default="full",
        help="full (the default): the text is part of the prompt; streaming: one token per frame, "
        "as for text that is still being written",
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument(
        "--json", type=file_path, metavar="FILE", help="write all figures to this file"
    )
    parser.add_argument(
        "--plot", type=file_path, metavar="FILE.png", help="plot the stages of the first chunk"
    )
    parser.add_argument(
        "--peer",
        action="store_true",
        help="also measure faster-qwen3-tts and qwen-tts with the same model, if installed",
    )


def run(options: argparse.Namespace) -> int:
    """Measures a model, prints the figures and writes them to files.

    Returns:
        0; errors are raised.

    Raises:
        UsageError: The options contradict each other, or a file cannot be written.
        MegakernelTTSError: The model cannot be loaded or measured.
        ValueError: The device does not exist, or memory does not suffice for the streams.
    """
    if options.peer and 1 not in options.streams:
        raise UsageError("--peer compares single streams; add 1 to --streams")
    for file in filter(None, (options.json, options.plot)):
        check_writable(file)
    if options.plot is not None and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib; pip install 'megakernel-tts[plot]'")
    from megakernel_tts.bench.benchmark import Options, measure
    from megakernel_tts.bench.report import plot, table, write_json

    raise_interrupts()
    report = measure(
        Options(
            model=options.model,
            random_weights=options.random_weights,
            device=options.device,
            num_runs=options.runs,
            chunk_sizes=options.chunks,
            stream_counts=options.streams,
            rates=options.rate,
            duration_s=options.duration,
            layout=options.layout,
            peers=options.peer,
        )
    )
    for line in table(report):
        print(line)
    if options.json is not None:
        write_json(report, options.json)
    if options.plot is not None:
        plot(report, options.plot)
    return 0
