"""`megakernel-tts`: say, voices, calibrate, bench, doctor."""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import megakernel_tts
from megakernel_tts.bench.options import add_options, given
from megakernel_tts.calibration import command as calibration
from megakernel_tts.cli import say as speaking
from megakernel_tts.cli.console import UsageError, drop_unwritten, fill_closed_streams, tell
from megakernel_tts.cli.output import check_writable
from megakernel_tts.errors import MegakernelTTSError

_PROGRAM = "megakernel-tts"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0 done, 1 it could not be done, 2 the command line is wrong, 130 interrupted.
    """
    fill_closed_streams()
    options = _parser().parse_args(arguments)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.name != "megakernel_tts.finish")  # `say` tells it
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    try:
        code = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except UsageError as error:
        tell(f"{_PROGRAM}: {error}")
        return 2
    except BrokenPipeError:  # whoever read the output has had enough
        return 1
    except (MegakernelTTSError, ValueError, OSError, RuntimeError) as error:
        tell(f"{_PROGRAM}: {error}")
        return 1
    except KeyboardInterrupt:
        tell(f"\n{_PROGRAM}: interrupted")
        return 130
    finally:
        drop_unwritten()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Speech from text with Qwen3-TTS, on your own machine."
    )
    parser.add_argument("--version", action="version", version=megakernel_tts.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    say = commands.add_parser("say", help="say a text", description="Says a text.")
    say.set_defaults(run=speaking.say)
    speaking.add_options(say)
    _add_model(say)

    voices = commands.add_parser("voices", help="list a model's voices and their languages")
    voices.set_defaults(run=_voices)
    _add_model(voices)

    calibrate = commands.add_parser(
        "calibrate",
        help="find out which of a model's heads tell when words are spoken",
        description="Finds the heads of attention that follow the text, by letting the model speak "
        "or by speech whose words' times are known, and writes alignment.json. With it beside a "
        "model, words' times come from the model and are no estimates.",
    )
    calibrate.set_defaults(run=_calibrate)
    calibration.add_options(calibrate)

    bench = commands.add_parser(
        "bench",
        help="measure how soon and how fast a model speaks here",
        description="Measures how soon and how fast a model speaks: the time from a text to the "
        "first chunk of its speech and what it consists of, then frames and real-time factor for "
        "several sizes of chunk and numbers of streams.",
    )
    bench.set_defaults(run=_bench)
    add_options(bench)

    doctor = commands.add_parser(
        "doctor", help="tell what this machine can run and what is missing"
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="demo",
        help="a folder, a hub id such as Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice (add @revision for "
        "one version), or demo (the default)",
    )


def _voices(options: argparse.Namespace) -> int:
    from megakernel_tts import TTS

    info = TTS.describe(options.model)
    if info.note:
        tell(info.note)
    for name, languages in info.voices.items():
        print(f"{name:12} {', '.join(languages)}")
    if info.kind == "base":
        print("This model speaks with cloned voices: say --clone recording.wav")
    elif info.kind == "voice_design":
        print("This model makes a voice from its description: say --instruct 'a warm, low voice'")
    if not info.voices:
        print(f"Languages: {', '.join(info.languages)}")
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    if options.output is not None:
        check_writable(options.output)
    found = calibration.calibrate(options)
    for line in calibration.table(found):
        print(line)
    file = options.output or found.file
    found.alignment.save(file)
    frames = found.alignment.lookahead
    tell(f"{len(found.alignment.heads)} heads (*), {frames} frames ahead, written to {file}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    if options.peer and 1 not in options.streams:
        raise UsageError("--peer compares one stream with one: let --streams have a 1 in it")
    for file in filter(None, (options.json, options.plot)):
        check_writable(file)
    if options.plot is not None and find_spec("matplotlib") is None:
        raise UsageError("--plot draws with matplotlib; pip install 'megakernel-tts[plot]'")
    from megakernel_tts.bench.command import measure
    from megakernel_tts.bench.report import plot, table, write_json

    report = measure(given(options))
    for line in table(report):
        print(line)
    if options.json is not None:
        write_json(report, options.json)
    if options.plot is not None:
        plot(report, options.plot)
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from megakernel_tts.cli.doctor import examine

    missing = 0
    for finding in examine():
        mark = {"ok": "ok  ", "note": "note", "missing": "MISSING"}[finding.status]
        print(f"{mark:8}{finding.text}")
        missing += finding.status == "missing"
    print("This machine can speak." if not missing else f"{missing} missing: see above.")
    return 1 if missing else 0
