"""Where a command's results go: files that can be written to, and speech as it is made."""

import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel_tts.cli.console import UsageError

if TYPE_CHECKING:
    from collections.abc import Generator

    from megakernel_tts import AudioChunk, Finish

    Chunks = Generator[AudioChunk, None, Finish]


def check_wav(path: Path) -> None:
    """Refuses what is no place for a wav file before a model is loaded for it.

    Raises:
        UsageError: With what to name instead.
    """
    if path.suffix.lower() not in ("", ".wav"):
        raise UsageError(
            f"{path}: only wav files are written; name it {path.with_suffix('.wav').name}, or pipe "
            "the PCM to a program that makes others"
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file; leave -o out and pipe the PCM instead")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Refuses a file that cannot be written to before anything is computed for it.

    Raises:
        UsageError: It cannot.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder that {path.name} could be written to")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written to")


@dataclass(frozen=True)
class Written:
    """Speech that was written.

    Attributes:
        seconds: Of audio.
        first: Seconds until the first chunk.
        finish: How it ended.
    """

    seconds: float
    first: float
    finish: "Finish"


def write(chunks: "Chunks", path: str | None, start: float) -> Written:
    """Writes chunks as they come.

    Args:
        chunks: Of one speech; closed at the end.
        path: A wav file; None writes raw PCM to standard output.
        start: When the speech was asked for, by `time.perf_counter`.

    Raises:
        ValueError: They are more than a wav file holds.
        OSError: They cannot be written.
    """
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
                    return Written(samples / rate, first, end.value)
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
