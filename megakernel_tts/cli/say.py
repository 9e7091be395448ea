"""`megakernel-tts say`: speaks a text, or what arrives on standard input, into a file or a pipe."""

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel_tts.cli.console import UsageError, arriving_text, tell
from megakernel_tts.cli.output import check_wav, write
from megakernel_tts.errors import TextError

if TYPE_CHECKING:
    from megakernel_tts import TTS, ModelInfo, Session, Voice
    from megakernel_tts.cli.output import Chunks

_VOICE_FILE = ".safetensors"
_CUT_SHORT = {
    "guard": "The speech ran away from its text and was stopped; another --seed may say it all.",
    "length": "The speech came to no end of its own and was cut at the greatest length; another "
    "--seed may say it all.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser, but `--model`, which is not its alone."""
    parser.add_argument("text", nargs="?", help="what to say; - speaks standard input as it comes")
    parser.add_argument("-f", "--file", type=Path, help="read the text from a file (UTF-8)")
    parser.add_argument(
        "-o",
        "--output",
        help="a wav file; without it, or with -, raw 16-bit PCM to standard output",
    )
    parser.add_argument("--voice", help="a named voice, or a voice file made with --save-voice")
    parser.add_argument("--language", default="auto", help="default: auto")
    parser.add_argument("--instruct", help="how to speak, or for VoiceDesign who")
    parser.add_argument("--clone", metavar="WAV", help="speak with the voice of this recording")
    parser.add_argument("--ref-text", help="what is said in the recording (the voice comes closer)")
    parser.add_argument("--save-voice", metavar="FILE", help="keep the cloned voice for --voice")
    parser.add_argument("--seed", type=int, help="the same seed gives the same speech")
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )


def say(options: argparse.Namespace) -> int:
    """Speaks, and ends with a line on standard error.

    Returns:
        0: what fails is raised.

    Raises:
        UsageError: Options that do not fit together or to the model, or bytes that are no text.
        MegakernelTTSError: The model cannot be loaded, or cannot say this.
        ValueError: No such device or seed.
        OSError: A file cannot be read or written.
    """
    text = _text(options)
    to_stdout = options.output in (None, "-")
    if to_stdout and (sys.stdout is None or sys.stdout.isatty()):
        found = "closed" if sys.stdout is None else "a terminal"
        raise UsageError(f"standard output is {found}; name a file with -o hello.wav, or pipe it")
    if not to_stdout:
        check_wav(Path(options.output))
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
        said = write(chunks, None if to_stdout else options.output, start)
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
