"""`megakernel-tts`: say, serve, voices, calibrate, transcribe, listen, check, bench, doctor."""

import argparse
import logging
import sys
from collections.abc import Sequence

import megakernel_tts
from megakernel_tts import MegakernelTTSError
from megakernel_tts.cli import bench, calibrate, check, listen, say, serve, transcribe
from megakernel_tts.cli.configuration import Configuration
from megakernel_tts.cli.console import (
    UsageError,
    discard_unwritten_output,
    open_closed_streams,
    print_status,
)
from megakernel_tts.cli.doctor import examine
from megakernel_tts.description import describe

_PROGRAM = "megakernel-tts"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0: success, 1: failure, 2: invalid command line, 130: interrupted.
    """
    open_closed_streams()
    options = _parser().parse_args(arguments)
    handler = logging.StreamHandler(sys.stderr)
    # `say` reports how a speech ended.
    handler.addFilter(lambda record: record.name != "megakernel_tts.finish")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    try:
        code = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except UsageError as error:
        print_status(f"{_PROGRAM}: {error}")
        return 2
    except BrokenPipeError:  # the reader of the output has closed it
        return 1
    except (MegakernelTTSError, ValueError, OSError, RuntimeError) as error:
        print_status(f"{_PROGRAM}: {error}")
        return 1
    except KeyboardInterrupt:
        print_status(f"\n{_PROGRAM}: interrupted")
        return 130
    finally:
        discard_unwritten_output()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Speech synthesis with Qwen3-TTS, and speech recognition, on your own machine.",
    )
    parser.add_argument("--version", action="version", version=megakernel_tts.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "say", help="synthesise a text", description="Synthesises a text to a file or a pipe."
    )
    command.set_defaults(run=say.run)
    say.add_options(command)
    _add_model(command)

    command = commands.add_parser(
        "serve",
        help="serve speech over HTTP and WebSockets",
        description="Serves speech to applications that speak OpenAI's or Cartesia's protocol.",
    )
    command.set_defaults(run=serve.run)
    serve.add_options(command)
    _add_model(command)
    Configuration(command)

    command = commands.add_parser("voices", help="list a model's voices and their languages")
    command.set_defaults(run=_voices)
    _add_model(command)

    command = commands.add_parser(
        "calibrate",
        help="select a model's alignment heads, for word times",
        description="Selects the attention heads that follow the text and writes alignment.json. "
        "The model speaks sentences, or repeats speech with known word times. A model with this "
        "file gives word times from its attention instead of estimates.",
    )
    command.set_defaults(run=calibrate.run)
    calibrate.add_options(command)

    command = commands.add_parser(
        "transcribe",
        help="recognise recordings",
        description="Recognises recordings with a FastConformer transducer.",
    )
    command.set_defaults(run=transcribe.run)
    transcribe.add_options(command)

    command = commands.add_parser(
        "listen",
        help="recognise PCM from standard input, or a microphone, as it arrives",
        description="Recognises 16-bit PCM of one channel from standard input, or the microphone; "
        "words are printed as they are recognised.",
    )
    command.set_defaults(run=listen.run)
    listen.add_options(command)

    command = commands.add_parser(
        "check",
        help="compare a recogniser with transformers, token by token",
        description="Recognises a recording with this package and with transformers (5.23 or "
        "newer), on the CPU in float32, and compares their tokens.",
    )
    command.set_defaults(run=check.run)
    check.add_options(command)

    command = commands.add_parser(
        "bench",
        help="measure latency and speed of a model on this machine",
        description="Measures the time from a text to the first chunk of its speech, with its "
        "stages, then frame time and real-time factor for several chunk sizes and numbers of "
        "streams.",
    )
    command.set_defaults(run=bench.run)
    bench.add_options(command)

    command = commands.add_parser(
        "doctor", help="report what this machine can run and what is missing"
    )
    command.set_defaults(run=_doctor)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="demo",
        help="a folder, a hub id such as Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice (add @revision for "
        "one version), or demo (the default)",
    )


def _voices(options: argparse.Namespace) -> int:
    info = describe(options.model)
    if info.note:
        print_status(info.note)
    for name, languages in info.voices.items():
        print(f"{name:12} {', '.join(languages)}")
    if info.kind == "base":
        print("This model needs a cloned voice: say --clone recording.wav")
    elif info.kind == "voice_design":
        print("This model creates a voice from a description: say --instruct 'a warm, low voice'")
    if not info.voices:
        print(f"Languages: {', '.join(info.languages)}")
    return 0


def _doctor(_: argparse.Namespace) -> int:
    num_missing = 0
    for finding in examine():
        mark = {"ok": "ok  ", "note": "note", "missing": "MISSING"}[finding.status]
        print(f"{mark:8}{finding.text}")
        num_missing += finding.status == "missing"
    print(
        f"{num_missing} missing: see above."
        if num_missing
        else "This machine can synthesise speech."
    )
    return 1 if num_missing else 0
