"""`megakernel-tts`: say, voices, doctor."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import megakernel_tts
from megakernel_tts.errors import MegakernelTTSError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megakernel_tts import TTS, AudioChunk, Voice

_PROGRAM = "megakernel-tts"


class _UsageError(Exception):
    """The words of the command line do not fit together."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0 done, 1 it could not be done, 2 the command line is wrong, 130 interrupted.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        return options.run(options)
    except _UsageError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    except (MegakernelTTSError, ValueError, OSError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{_PROGRAM}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Speech from text with Qwen3-TTS, on your own machine."
    )
    parser.add_argument("--version", action="version", version=megakernel_tts.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    say = commands.add_parser("say", help="say a text", description="Says a text.")
    say.set_defaults(run=_say)
    say.add_argument("text", nargs="?", help="what to say; - reads standard input")
    say.add_argument("-f", "--file", type=Path, help="read the text from a file (UTF-8)")
    say.add_argument(
        "-o",
        "--output",
        help="a wav file; without it, or with -, raw 16-bit PCM to standard output",
    )
    say.add_argument("--voice", help="a named voice, or a voice file made with --save-voice")
    say.add_argument("--language", default="auto", help="default: auto")
    say.add_argument("--instruct", help="how to speak, or for VoiceDesign who")
    say.add_argument("--clone", metavar="WAV", help="speak with the voice of this recording")
    say.add_argument("--ref-text", help="what is said in the recording (the voice comes closer)")
    say.add_argument("--save-voice", metavar="FILE", help="keep the cloned voice for --voice")
    say.add_argument("--seed", type=int, help="the same seed gives the same speech")
    _add_model(say)
    say.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")

    voices = commands.add_parser("voices", help="list a model's voices and their languages")
    voices.set_defaults(run=_voices)
    _add_model(voices)

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


def _say(options: argparse.Namespace) -> int:
    text = _text(options)
    to_stdout = options.output in (None, "-")
    if to_stdout and sys.stdout.isatty():
        raise _UsageError(
            "standard output is a terminal; name a file with -o hello.wav, or pipe it"
        )
    if options.voice and options.clone:
        raise _UsageError("--voice and --clone name two voices; give one of them")
    for name in ("ref_text", "save_voice"):
        if getattr(options, name) and not options.clone:
            raise _UsageError(
                f"--{name.replace('_', '-')} belongs to a recording; name it with --clone"
            )
    if not to_stdout:
        _check_output(Path(options.output))
    from megakernel_tts import TTS

    with TTS.load(options.model, options.device, slots=1) as tts:
        voice = _voice(tts, options)
        sampling = tts.sampling
        if options.seed is not None:
            sampling = replace(sampling, seed=options.seed)
        start = time.perf_counter()
        chunks = tts.stream(text, voice, options.language, options.instruct, sampling=sampling)
        seconds, first = _write(chunks, None if to_stdout else options.output, start)
        elapsed = time.perf_counter() - start
    where = "" if to_stdout else f" in {options.output}"
    factor = elapsed / seconds if seconds else 0.0
    print(
        f"{seconds:.2f} s of audio{where}, first chunk after {1000 * first:.0f} ms, "
        f"real-time factor {factor:.2f}",
        file=sys.stderr,
    )
    return 0


def _check_output(path: Path) -> None:
    """Refuses a place that cannot be written to before a model is loaded for it."""
    if path.exists() and not path.is_file():
        raise _UsageError(f"{path} is no regular file; leave -o out and pipe the PCM instead")
    if not path.parent.is_dir():
        raise _UsageError(f"{path.parent} is no folder that {path.name} could be written to")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _UsageError(f"{path} cannot be written to")


def _text(options: argparse.Namespace) -> str:
    if (options.text is None) == (options.file is None):
        raise _UsageError("give a text, - for standard input, or --file (one of them)")
    try:
        if options.file is not None:
            return options.file.read_text(encoding="utf-8")
        if options.text == "-":
            return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        source = options.file or "standard input"
        raise _UsageError(
            f"{source} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    return options.text


def _voice(tts: "TTS", options: argparse.Namespace) -> "str | Voice | None":
    from megakernel_tts import Voice

    if options.clone:
        voice = tts.clone(options.clone, options.ref_text)
        if options.save_voice:
            voice.save(options.save_voice)
        return voice
    if options.voice and (options.voice.endswith(".safetensors") or Path(options.voice).is_file()):
        return Voice.load(options.voice)
    return options.voice


def _write(chunks: "Iterator[AudioChunk]", path: str | None, start: float) -> tuple[float, float]:
    """Writes chunks as they come; gives the seconds of audio and the time to the first chunk."""
    from tqdm import tqdm

    from megakernel_tts.audio import WavWriter

    samples, rate, first = 0, 24_000, 0.0
    writer = WavWriter(path, rate) if path is not None else None
    progress = tqdm(
        unit="s", desc="speaking", disable=None, bar_format="{desc} {n:.1f} s [{elapsed}]"
    )
    try:
        with progress:
            for chunk in chunks:
                first = first or time.perf_counter() - start
                if writer is not None:
                    writer.write(chunk.pcm)
                else:
                    sys.stdout.buffer.write(chunk.pcm.astype("<i2").tobytes())
                    sys.stdout.buffer.flush()
                samples, rate = samples + len(chunk.pcm), chunk.sample_rate
                progress.update(len(chunk.pcm) / rate)
    finally:
        if writer is not None:
            writer.close()
    return samples / rate, first


def _voices(options: argparse.Namespace) -> int:
    from megakernel_tts import TTS

    info = TTS.describe(options.model)
    if info.note:
        print(info.note, file=sys.stderr)
    for name, languages in info.voices.items():
        print(f"{name:12} {', '.join(languages)}")
    if info.kind == "base":
        print("This model speaks with cloned voices: say --clone recording.wav")
    elif info.kind == "voice_design":
        print("This model makes a voice from its description: say --instruct 'a warm, low voice'")
    if not info.voices:
        print(f"Languages: {', '.join(info.languages)}")
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from megakernel_tts.doctor import examine

    missing = 0
    for finding in examine():
        mark = {"ok": "ok  ", "note": "note", "missing": "MISSING"}[finding.status]
        print(f"{mark:8}{finding.text}")
        missing += finding.status == "missing"
    print("This machine can speak." if not missing else f"{missing} missing: see above.")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
