"""`megakernel-tts say`: synthesises a text, or standard input as it arrives, to a file or pipe."""

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel_tts import (
    AudioChunk,
    PronunciationError,
    Pronunciations,
    Sampling,
    SamplingError,
    SpeedError,
    TextError,
    Voice,
    check_speed,
)
from megakernel_tts.cli.console import (
    UsageError,
    arriving_text,
    file_path,
    nonempty,
    permanent_imports,
    print_status,
    raise_interrupts,
)
from megakernel_tts.cli.output import check_wav, check_writable, write_speech

if TYPE_CHECKING:
    from megakernel_tts import TTS, ModelInfo, Session
    from megakernel_tts.cli.output import Chunks

VOICE_FILE_SUFFIX = ".safetensors"

_MAX_WAITING_SEGMENTS = 2  # of live text; more of it is not read

# Why a speech is incomplete, by the reason of its finish.
_INCOMPLETE = {
    "guard": "The speech continued after its text and was stopped; try another --seed.",
    "length": "The speech reached the maximum length and was cut; try another --seed.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser, except for `--model`."""
    parser.add_argument(
        "text", nargs="?", help="the text; - synthesises standard input as it arrives"
    )
    parser.add_argument("-f", "--file", type=file_path, help="read the text from a file (UTF-8)")
    parser.add_argument(
        "-o",
        "--output",
        type=nonempty,
        help="a wav file; without it, or with -, raw 16-bit PCM is written to standard output",
    )
    parser.add_argument(
        "--voice", type=nonempty, help="a named voice, or a voice file from --save-voice"
    )
    parser.add_argument(
        "--language", default="auto", help="a language of the model (default: auto)"
    )
    parser.add_argument(
        "--instruct", help="how to speak; for VoiceDesign a description of the voice"
    )
    parser.add_argument(
        "--clone", type=nonempty, metavar="WAV", help="clone the voice of this recording"
    )
    parser.add_argument(
        "--ref-text",
        type=nonempty,
        help="transcript of the recording (improves the similarity of the voice)",
    )
    parser.add_argument(
        "--save-voice", type=file_path, metavar="FILE", help="save the cloned voice for --voice"
    )
    parser.add_argument(
        "--speed", type=float, default=1.0, help="0.5 to 2, at the same pitch (default: 1)"
    )
    parser.add_argument(
        "--pronunciations",
        type=file_path,
        metavar="FILE",
        help="respellings of words: a TOML file with lines like nginx = 'engine ex', or JSON",
    )
    parser.add_argument("--seed", type=int, help="the same seed gives the same speech")
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )


def run(options: argparse.Namespace) -> int:
    """Synthesises the text and prints a summary to standard error.

    Returns:
        0; errors are raised.

    Raises:
        UsageError: The options contradict each other or the model, a value is invalid, or the
            input is not UTF-8.
        MegakernelTTSError: The model cannot be loaded, or cannot synthesise the text.
        ValueError: The device is invalid.
        OSError: A file cannot be read or written.
    """
    text = _text(options)
    to_stdout = options.output in (None, "-")
    if to_stdout and (sys.stdout is None or sys.stdout.isatty()):
        state = "closed" if sys.stdout is None else "a terminal"
        raise UsageError(f"standard output is {state}; name a file with -o hello.wav, or pipe it")
    if not to_stdout:
        check_wav(Path(options.output))
    _check_voice_options(options)
    _check_seed(options.seed)
    _check_speed(options.speed)
    table = _read_pronunciations(options.pronunciations)
    with permanent_imports():
        from megakernel_tts import TTS

    raise_interrupts()
    with TTS.load(options.model, options.device, slots=1) as tts:
        _check_model_options(tts.info, options)
        voice = _load_voice(tts, options)
        sampling = tts.sampling
        if options.seed is not None:
            sampling = replace(sampling, seed=options.seed)
        sampling = sampling.seeded()
        style = (voice, options.language, options.instruct)
        if text is None:
            session = tts.open(*style, sampling=sampling, speed=options.speed, pronunciations=table)
            portions = _nonempty_input()
            start_s = time.perf_counter()
            chunks = _stream_live(session, portions)
        else:
            start_s = time.perf_counter()
            chunks = tts.stream(
                text, *style, sampling=sampling, speed=options.speed, pronunciations=table
            )
        speech = write_speech(chunks, None if to_stdout else options.output, start_s)
        elapsed_s = time.perf_counter() - start_s
    if speech.finish.reason in _INCOMPLETE:
        print_status(_INCOMPLETE[speech.finish.reason])
    where = "" if to_stdout else f" in {options.output}"
    real_time_factor = elapsed_s / speech.seconds if speech.seconds else 0.0
    print_status(
        f"{speech.seconds:.2f} s of audio{where}, first chunk after "
        f"{1000 * speech.first_chunk_s:.0f} ms, real-time factor {real_time_factor:.2f}, "
        f"seed {sampling.seed}"
    )
    return 0


def _text(options: argparse.Namespace) -> str | None:
    """The text; None for standard input."""
    if (options.text is None) == (options.file is None):
        raise UsageError("give a text, - for standard input, or --file (exactly one of them)")
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


def _check_voice_options(options: argparse.Namespace) -> None:
    """Refuses voice options that contradict each other."""
    if options.voice and options.clone:
        raise UsageError("--voice and --clone select two voices; give one of them")
    for name in ("ref_text", "save_voice"):
        if getattr(options, name) and not options.clone:
            raise UsageError(f"--{name.replace('_', '-')} needs a recording; name it with --clone")
    if options.save_voice:
        check_writable(options.save_voice)
    voice = options.voice or ""
    if (voice.endswith(VOICE_FILE_SUFFIX) or os.sep in voice) and not Path(voice).is_file():
        state = "is a folder" if Path(voice).is_dir() else "does not exist"
        raise UsageError(f"{voice} {state}; create a voice file with --clone and --save-voice")


def _check_seed(seed: int | None) -> None:
    try:
        Sampling(seed=seed)
    except SamplingError as error:
        raise UsageError(f"--{error}") from None


def _check_speed(speed: float) -> None:
    try:
        check_speed(speed)
    except SpeedError as error:
        raise UsageError(f"--{error}") from None


def _read_pronunciations(path: Path | None) -> "Pronunciations":
    """Reads the file of the option `--pronunciations`; without one, the table is empty.

    Raises:
        UsageError: The file is invalid.
        OSError: The file cannot be read.
    """
    try:
        return Pronunciations() if path is None else Pronunciations.load(path)
    except PronunciationError as error:
        raise UsageError(str(error)) from None


def _check_model_options(info: "ModelInfo", options: argparse.Namespace) -> None:
    """Refuses options that the model does not support, and missing ones that it needs."""
    if info.kind == "base":
        if not (options.clone or _is_voice_file(options.voice, info)):
            raise UsageError(
                "a Base model needs a cloned voice: give --clone with a recording (and --ref-text "
                "with its transcript), or --voice with a file from --save-voice"
            )
    elif options.clone or _is_voice_file(options.voice, info):
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
            "this model does not support --instruct; 1.7B-CustomVoice and 1.7B-VoiceDesign do"
        )


def _is_voice_file(voice: str | None, info: "ModelInfo") -> bool:
    """Whether `--voice` is the name of a file, not of a voice."""
    if voice is None:
        return False
    return voice.endswith(VOICE_FILE_SUFFIX) or (info.kind == "base" and Path(voice).exists())


def _load_voice(tts: "TTS", options: argparse.Namespace) -> str | Voice | None:
    if options.clone:
        voice = tts.clone(options.clone, options.ref_text)
        if options.save_voice:
            voice.save(options.save_voice)
        return voice
    if _is_voice_file(options.voice, tts.info):
        return Voice.load(options.voice)
    return options.voice


def _nonempty_input() -> Iterator[str]:
    """Standard input as it arrives; waits for the first text that is not whitespace."""
    portions = arriving_text()
    for text in portions:
        if text.strip():
            return chain([text], portions)
    raise TextError("There is nothing to say: standard input is empty or only whitespace.")


def _stream_live(session: "Session", portions: Iterator[str]) -> "Chunks":
    """Synthesises a text while it is being written, and takes it no faster than it is spoken."""
    failures: list[Exception] = []
    push_lock = threading.Lock()
    progress = threading.Event()

    def push() -> None:
        try:
            for text in portions:
                with push_lock:
                    session.push_text(text)
                while session.num_waiting_segments > _MAX_WAITING_SEGMENTS:
                    progress.wait()
                    progress.clear()
            with push_lock:
                session.end()
        except Exception as error:
            failures.append(error)
            session.cancel()

    threading.Thread(target=push, daemon=True).start()  # may block on the input for ever
    try:
        for event in session:
            progress.set()
            if isinstance(event, AudioChunk):
                yield event
    finally:
        session.cancel()
        push_lock.acquire()  # never released: no thread may be inside the tokenizer at exit
    finish = session.finish
    assert finish is not None  # set before the iteration ends
    if failure := next(iter(failures), finish.error):
        raise failure
    return finish
