"""`megakernel-tts listen`: recognises PCM from standard input or a microphone as it arrives."""

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megakernel_common.errors import MissingExtraError
from megakernel_tts.cli.console import UsageError
from megakernel_tts.cli.transcribe import add_model_options, load_recogniser

if TYPE_CHECKING:
    from megakernel_stt import Session

_PORTION_BYTES = 4096  # of standard input, read at a time
_MICROPHONE_S = 0.02  # of its audio, read at a time


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    parser.add_argument(
        "--microphone", action="store_true", help="listen to the microphone (extra: listen)"
    )
    parser.add_argument(
        "--rate", type=int, default=16_000, help="sampling rate of the PCM in Hz (default: 16000)"
    )
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Recognises 16-bit PCM of one channel, and prints words as they are recognised.

    Returns:
        0; errors are raised.

    Raises:
        UsageError: Standard input is closed or a terminal, and no microphone is requested.
        MissingExtraError: The extra for the microphone is not installed.
        OSError: The microphone cannot be read.
        MegakernelTTSError: The model cannot be loaded, or recognition failed.
        ValueError: The device is invalid.
    """
    if not options.microphone and (sys.stdin is None or sys.stdin.isatty()):
        state = "closed" if sys.stdin is None else "a terminal"
        raise UsageError(
            f"standard input is {state}; pipe 16-bit PCM of one channel into it, such as that of "
            "arecord -q -t raw -f S16_LE -r 16000 -c 1, or use --microphone"
        )
    pcm = _microphone_pcm(options.rate) if options.microphone else _arriving_pcm()
    with load_recogniser(options) as stt:
        lookahead = {} if options.lookahead is None else {"lookahead_ms": options.lookahead}
        with stt.open(options.language, **lookahead) as session:
            printed = ""
            for text in _texts(session, pcm, options.rate):
                # Tokens do not change, so a text begins with the one before.
                print(text[len(printed) :], end="", flush=True)
                printed = text
            print()
    return 0


def _texts(session: "Session", audio: Iterator[bytes], sample_rate: int) -> Iterator[str]:
    """The text so far, each time that it has grown."""
    failures: list[Exception] = []

    def push() -> None:
        try:
            for pcm in audio:
                session.push(pcm, sample_rate)
            session.end()
        except Exception as error:
            failures.append(error)
            session.cancel()

    threading.Thread(target=push, daemon=True).start()  # may block on the input for ever
    for event in session:
        yield event.transcript.text
    if failures:
        raise failures[0]


def _microphone_pcm(sample_rate: int) -> Iterator[bytes]:
    """Yields the audio of the default microphone, without an end."""
    try:
        import sounddevice
    except (ImportError, OSError) as error:  # the latter without the library PortAudio
        raise MissingExtraError(
            f"--microphone needs the extra listen and PortAudio ({error}): "
            "pip install 'megakernel-tts[listen]', and on Debian apt install libportaudio2"
        ) from error
    size = round(_MICROPHONE_S * sample_rate)
    try:
        with sounddevice.RawInputStream(sample_rate, size, channels=1, dtype="int16") as stream:
            while True:
                yield bytes(stream.read(size)[0])
    except sounddevice.PortAudioError as error:
        raise OSError(f"The microphone cannot be read: {error}") from error


def _arriving_pcm() -> Iterator[bytes]:
    """Yields standard input as it arrives, in whole samples; drops half a sample at its end."""
    half = b""
    # Python's buffered reader has a lock that a thread blocked in it would hold at exit.
    while data := os.read(sys.stdin.fileno(), _PORTION_BYTES):
        data = half + data
        whole = len(data) // 2 * 2
        half = data[whole:]
        yield data[:whole]
