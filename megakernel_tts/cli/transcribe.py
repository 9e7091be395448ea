"""`megakernel-tts transcribe`: recognises recordings, as text, words, JSON or subtitles."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from megakernel_tts.cli.console import (
    UsageError,
    nonempty,
    permanent_imports,
    raise_interrupts,
)

if TYPE_CHECKING:
    from megakernel_stt import STT, Transcript, Word

_MAX_CUE_CHARACTERS = 84  # two lines of a subtitle
_MAX_CUE_S = 7.0
_MAX_PAUSE_S = 1.0  # within a subtitle


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select a recogniser."""
    parser.add_argument(
        "--model",
        type=nonempty,
        default="demo",
        help="demo, a small model for English (the default), a folder that transformers saved, a "
        ".nemo file, or a hub id such as nvidia/nemotron-speech-streaming-en-0.6b",
    )
    add_request_options(parser)
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how to recognise."""
    parser.add_argument(
        "--language", default="auto", help="a language of the model (default: auto)"
    )
    parser.add_argument(
        "--lookahead",
        type=int,
        metavar="MS",
        help="length of a chunk: 80, 160, 560 or 1120 ms with most streaming models",
    )


def load_recogniser(options: argparse.Namespace) -> "STT":
    """Loads the model of the options, for one stream.

    Raises:
        MegakernelTTSError: The model cannot be loaded.
        ValueError: The device is invalid.
    """
    with permanent_imports():
        from megakernel_stt import STT

    raise_interrupts()
    return STT.load(options.model, options.device, slots=1)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    parser.add_argument("files", nargs="+", type=nonempty, metavar="FILE", help="a recording")
    parser.add_argument(
        "--words", action="store_true", help="print each word with its times and confidence"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print an object with text, words and seconds per file"
    )
    form.add_argument("--srt", action="store_true", help="print subtitles (one file)")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Recognises the files and prints each as soon as it is done.

    Returns:
        0; errors are raised.

    Raises:
        UsageError: The options contradict each other.
        MegakernelTTSError: The model cannot be loaded, or cannot recognise a file.
        ValueError: The device is invalid.
    """
    if options.srt and len(options.files) > 1:
        raise UsageError("--srt takes one file; run the command for each")
    if options.words and (options.json or options.srt):
        raise UsageError("--words is for text; --json and --srt have the times of words anyway")
    with load_recogniser(options) as stt:
        for file in options.files:
            transcript = stt.transcribe(file, options.language, options.lookahead)
            for line in _lines(file, transcript, options):
                print(line, flush=True)
    return 0


def _lines(file: str, transcript: "Transcript", options: argparse.Namespace) -> Iterator[str]:
    """The output for a file."""
    words = transcript.words
    if options.json:
        content = {
            "file": file,
            "text": transcript.text,
            "words": [_rounded(word) for word in words],
            "seconds": round(transcript.seconds, 3),
        }
        yield json.dumps(content, ensure_ascii=False)
    elif options.srt:
        yield from subtitles(words)
    else:
        prefix = f"{file}: " if len(options.files) > 1 else ""
        yield prefix + transcript.text
        if options.words:
            for word in words:
                yield f"{word.start:9.2f} {word.end:9.2f} {word.confidence:6.2f}  {word.text}"


def _rounded(word: "Word") -> dict[str, object]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in asdict(word).items()
    }


def subtitles(words: "Sequence[Word]") -> Iterator[str]:
    """Divides words into subtitles in the SubRip format.

    One ends with a sentence, before a pause of a second, after 7 s or after 84 characters.

    Args:
        words: In order.

    Yields:
        Lines.
    """
    cue: list[Word] = []
    number = 0
    for word, following in zip(words, [*words, None][1:], strict=True):
        cue.append(word)
        text = " ".join(w.text for w in cue)
        is_last = following is None or (
            text.endswith((".", "?", "!"))
            or following.start - word.end > _MAX_PAUSE_S
            or following.end - cue[0].start > _MAX_CUE_S
            or len(text) + 1 + len(following.text) > _MAX_CUE_CHARACTERS
        )
        if is_last:
            number += 1
            yield from (str(number), f"{_clock(cue[0].start)} --> {_clock(word.end)}", text, "")
            cue = []


def _clock(seconds: float) -> str:
    """A time as SubRip writes it."""
    ms = round(1000 * seconds)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02},{ms % 1000:03}"
