"""`megakernel-tts calibrate`: writes the `alignment.json` of a model."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel_tts import Voice
from megakernel_tts.cli.console import (
    UsageError,
    file_path,
    nonempty,
    print_status,
    raise_interrupts,
)
from megakernel_tts.cli.output import check_writable
from megakernel_tts.cli.say import VOICE_FILE_SUFFIX

if TYPE_CHECKING:
    from megakernel_tts.calibration.calibrate import Calibration

_MAX_SENTENCE_CHARS = 200  # so that a sentence is one segment
_NUM_SHOWN = 8  # heads in the table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    parser.add_argument("model", help="a folder, a hub id, or demo")
    parser.add_argument(
        "--sentences",
        type=file_path,
        help="a file with one sentence per line for the model to speak (default: twelve English "
        "sentences)",
    )
    parser.add_argument(
        "--truth",
        type=file_path,
        help="a file of speech with known word times, instead of sentences; heads are ranked by "
        "their errors (format: megakernel_tts/calibration/ground_truth.py)",
    )
    parser.add_argument(
        "--voice", type=nonempty, help="a named voice, or a voice file for a Base model"
    )
    parser.add_argument(
        "--instruct", help="how to speak; for VoiceDesign a description of the voice"
    )
    parser.add_argument(
        "-o", "--output", type=file_path, help="default: alignment.json in the model's folder"
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )


def run(options: argparse.Namespace) -> int:
    """Calibrates a model, prints the best heads and writes the file.

    Returns:
        0; errors are raised.

    Raises:
        UsageError: The options contradict each other, the sentences cannot be used, or the output
            cannot be written.
        MegakernelTTSError: The model or the ground truth cannot be used.
    """
    if options.truth is not None and options.sentences is not None:
        raise UsageError("--truth contains the texts; leave --sentences out")
    sentences = None if options.sentences is None else _read_sentences(options.sentences)
    from megakernel_tts.calibration.calibrate import SENTENCES, alignment_file, calibrate

    raise_interrupts()
    file = options.output or alignment_file(options.model)
    check_writable(file)
    voice = options.voice
    if voice is not None and voice.endswith(VOICE_FILE_SUFFIX):
        voice = Voice.load(voice)
    calibration = calibrate(
        options.model,
        options.device,
        sentences=sentences or SENTENCES,
        truth=options.truth,
        voice=voice,
        instruct=options.instruct,
    )
    for line in _table(calibration):
        print(line)
    alignment = calibration.alignment
    alignment.save(file)
    print_status(
        f"{len(alignment.heads)} alignment heads (*), look-ahead of {alignment.lookahead} frames, "
        f"written to {file}"
    )
    return 0


def _read_sentences(file: Path) -> Sequence[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as UTF-8 text ({error})") from None
    if not any(lines):
        raise UsageError(f"{file} contains no sentences; write one per line")
    for number, line in enumerate(lines, 1):
        if len(line) > _MAX_SENTENCE_CHARS:
            raise UsageError(
                f"{file}: line {number} has {len(line)} characters; the maximum is "
                f"{_MAX_SENTENCE_CHARS}, so that a sentence is one segment"
            )
    return [line for line in lines if line]


def _table(calibration: "Calibration") -> list[str]:
    """The best heads as lines of text; alignment heads are marked."""
    lines = ["  layer  head  nats above chance  mean error"]
    for ranked in calibration.ranked[:_NUM_SHOWN]:
        layer, head = ranked.head
        mark = "*" if ranked.head in calibration.alignment.heads else " "
        error = "" if ranked.error_s is None else f"{1000 * ranked.error_s:8.0f} ms"
        lines.append(f"{mark} {layer:5}  {head:4}  {ranked.monotonicity:17.2f} {error}")
    return lines
