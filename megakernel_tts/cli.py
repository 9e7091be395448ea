"""`megakernel-tts`: say, voices, calibrate, bench, doctor."""

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import megakernel_tts
from megakernel_tts import calibrate as calibration
from megakernel_tts.bench.options import add_options, given
from megakernel_tts.console import (
    UsageError,
    arriving_text,
    drop_unwritten,
    fill_closed_streams,
    tell,
)
from megakernel_tts.errors import MegakernelTTSError, TextError

if TYPE_CHECKING:
    from collections.abc import Generator

    from megakernel_tts import TTS, AudioChunk, Finish, ModelInfo, Session, Voice

    Chunks = Generator[AudioChunk, None, Finish]

_PROGRAM = "megakernel-tts"
_VOICE_FILE = ".safetensors"
_CUT_SHORT = {
    "guard": "The speech ran away from its text and was stopped; another --seed may say it all.",
    "length": "The speech came to no end of its own and was cut at the greatest length; another "
    "--seed may say it all.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0 done, 1 it could not be done, 2 the command line is wrong, 130 interrupted.
    """
    fill_closed_streams()
    options = _parser().parse_args(arguments)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.name != "megakernel_tts.finish")  # `_say` tells it
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
    say.set_defaults(run=_say)
    say.add_argument("text", nargs="?", help="what to say; - speaks standard input as it comes")
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


def _say(options: argparse.Namespace) -> int:
    text = _text(options)
    to_stdout = options.output in (None, "-")
    if to_stdout and (sys.stdout is None or sys.stdout.isatty()):
        found = "closed" if sys.stdout is None else "a terminal"
        raise UsageError(f"standard output is {found}; name a file with -o hello.wav, or pipe it")
    if not to_stdout:
        _check_output(Path(options.output))
    _check_voice(options)
    from megakernel_tts import TTS

    with TTS.load(options.model, options.device, slots=1) as tts:
        _check_model(tts.info, options)
        voice = _voice(tts, options)
        sampling = tts.sampling
        if options.seed is not None:
            sampling = replace(sampling, seed=options.seed)
        sampling = sampling.seeded()
        manner = (voice, options.language, options.instruct)
        if text is None:
            session = tts.open(*manner, sampling=sampling)
            portions = _first_words()
            start = time.perf_counter()
            chunks = _speak_live(session, portions)
        else:
            start = time.perf_counter()
            chunks = tts.stream(text, *manner, sampling=sampling)
        said = _write(chunks, None if to_stdout else options.output, start)
        elapsed = time.perf_counter() - start
    if said.finish.reason in _CUT_SHORT:
        tell(_CUT_SHORT[said.finish.reason])
    where = "" if to_stdout else f" in {options.output}"
    factor = elapsed / said.seconds if said.seconds else 0.0
    tell(
        f"{said.seconds:.2f} s of audio{where}, first chunk after {1000 * said.first:.0f} ms, "
        f"real-time factor {factor:.2f}, seed {sampling.seed}"
    )
    return 0


def _check_output(path: Path) -> None:
    """Refuses a place that cannot be written to before a model is loaded for it."""
    if path.suffix.lower() not in ("", ".wav"):
        raise UsageError(
            f"{path}: only wav files are written; name it {path.with_suffix('.wav').name}, or pipe "
            "the PCM to a program that makes others"
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file; leave -o out and pipe the PCM instead")
    _check_writable(path)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder that {path.name} could be written to")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written to")


def _text(options: argparse.Namespace) -> str | None:
    """The text; None if it comes from standard input."""
    if (options.text is None) == (options.file is None):
        raise UsageError("give a text, - for standard input, or --file (one of them)")
    try:
        if options.file is not None:
            return options.file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{options.file} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    if options.text == "-" and sys.stdin is None:
        raise UsageError("standard input is closed; give a text, or name a file with --file")
    return None if options.text == "-" else options.text


def _check_voice(options: argparse.Namespace) -> None:
    """Refuses options that do not fit together."""
    for name in ("voice", "clone", "ref_text", "save_voice"):
        if getattr(options, name) == "":
            raise UsageError(f"--{name.replace('_', '-')} is empty")
    if options.voice and options.clone:
        raise UsageError("--voice and --clone name two voices; give one of them")
    for name in ("ref_text", "save_voice"):
        if getattr(options, name) and not options.clone:
            raise UsageError(
                f"--{name.replace('_', '-')} belongs to a recording; name it with --clone"
            )
    if (options.voice or "").endswith(_VOICE_FILE) and not Path(options.voice).is_file():
        raise UsageError(
            f"{options.voice} does not exist; --clone makes a voice, and --save-voice keeps it"
        )


def _check_model(info: "ModelInfo", options: argparse.Namespace) -> None:
    """Refuses options that do not fit the model, and asks for those that it needs."""
    if info.kind == "base":
        if not (options.clone or _is_file(options.voice, info)):
            raise UsageError(
                "a Base model speaks with a cloned voice: give --clone with a recording (and "
                "--ref-text with what is said in it), or --voice with a file of --save-voice"
            )
    elif options.clone or _is_file(options.voice, info):
        raise UsageError(
            f"a cloned voice (--clone, or --voice with a file) needs a Base model, and this one is "
            f"{info.kind}; name one, such as --model Qwen/Qwen3-TTS-12Hz-0.6B-Base"
        )
    instruct = (options.instruct or "").strip()
    if info.kind == "voice_design" and (options.voice or not instruct):
        raise UsageError(
            "a VoiceDesign model has no named voices; describe one with --instruct 'a warm, low "
            "voice', and leave --voice out"
        )
    if instruct and not info.takes_instruct:
        raise UsageError(
            "this model follows no --instruct; those that do are 1.7B-CustomVoice and "
            "1.7B-VoiceDesign"
        )


def _is_file(voice: str | None, info: "ModelInfo") -> bool:
    """Whether a voice is a file's name, and not a voice's."""
    if voice is None:
        return False
    return voice.endswith(_VOICE_FILE) or (info.kind == "base" and Path(voice).is_file())


def _voice(tts: "TTS", options: argparse.Namespace) -> "str | Voice | None":
    from megakernel_tts import Voice

    if options.clone:
        voice = tts.clone(options.clone, options.ref_text)
        if options.save_voice:
            voice.save(options.save_voice)
        return voice
    if _is_file(options.voice, tts.info):
        return Voice.load(options.voice)
    return options.voice


def _first_words() -> Iterator[str]:
    """Standard input as it arrives, once there is something in it to say."""
    portions = arriving_text()
    for text in portions:
        if text.strip():
            return chain([text], portions)
    raise TextError("There is nothing to say: standard input is empty or only whitespace.")


def _speak_live(session: "Session", portions: Iterator[str]) -> "Chunks":
    """Speaks a text while it is being written."""
    from megakernel_tts import AudioChunk

    failures: list[Exception] = []
    pushing = threading.Lock()

    def push() -> None:
        try:
            for text in portions:
                with pushing:
                    session.push_text(text)
            with pushing:
                session.end()
        except Exception as error:
            failures.append(error)
            session.cancel()

    threading.Thread(target=push, daemon=True).start()  # a daemon: more may never come
    try:
        for event in session:
            if isinstance(event, AudioChunk):
                yield event
    finally:
        session.cancel()
        pushing.acquire()  # for good: at exit no thread may be inside the tokenizer
    finish = session.finish
    assert finish is not None  # the iteration ends after the finish
    if failure := next(iter(failures), finish.error):
        raise failure
    return finish


@dataclass(frozen=True)
class _Said:
    """What was written."""

    seconds: float
    first: float  # seconds until the first chunk
    finish: "Finish"


def _write(chunks: "Chunks", path: str | None, start: float) -> _Said:
    """Writes chunks as they come."""
    from tqdm import tqdm

    from megakernel_tts.audio import WavWriter

    samples, rate, first = 0, 24_000, 0.0
    writer = WavWriter(path, rate) if path is not None else None
    progress = tqdm(
        unit="s", desc="speaking", disable=None, bar_format="{desc} {n:.1f} s [{elapsed}]"
    )
    try:
        with progress, closing(chunks):
            while True:
                try:
                    chunk = next(chunks)
                except StopIteration as end:
                    return _Said(samples / rate, first, end.value)
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
        _check_writable(options.output)
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
        _check_writable(file)
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
    from megakernel_tts.doctor import examine

    missing = 0
    for finding in examine():
        mark = {"ok": "ok  ", "note": "note", "missing": "MISSING"}[finding.status]
        print(f"{mark:8}{finding.text}")
        missing += finding.status == "missing"
    print("This machine can speak." if not missing else f"{missing} missing: see above.")
    return 1 if missing else 0
