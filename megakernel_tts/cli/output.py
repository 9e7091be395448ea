"""Output of commands: checks of output files, and speech that is written while it is produced."""

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from megakernel_common.files import check_output
from megakernel_tts.audio import WavWriter
from megakernel_tts.cli.console import UsageError

if TYPE_CHECKING:
    from collections.abc import Generator

    from megakernel_tts import AudioChunk, Finish

    Chunks = Generator[AudioChunk, None, Finish]


def check_wav(path: Path) -> None:
    """Checks that a wav file can be written, before a model is loaded.

    Raises:
        UsageError: It cannot be written, or has the suffix of another format.
    """
    if path.suffix.lower() not in ("", ".wav"):
        raise UsageError(
            f"{path}: only wav files are supported; name it {path.with_suffix('.wav').name}, or "
            "pipe the PCM to a converter"
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file; leave -o out and pipe the PCM instead")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Checks that a file can be written, before it is computed.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        check_output(path)
    except OSError as error:
        raise UsageError(f"{error}") from None


@dataclass(frozen=True)
class WrittenSpeech:
    """A speech that was written.

    Attributes:
        seconds: Duration of the audio.
        first_chunk_s: Time until the first chunk in seconds.
        finish: How the speech ended.
    """

    seconds: float
    first_chunk_s: float
    finish: "Finish"


def write_speech(chunks: "Chunks", path: str | None, start_s: float) -> WrittenSpeech:
    """Writes chunks as they are produced.

    Args:
        chunks: Of one speech; closed at the end.
        path: A wav file; None writes raw PCM to standard output.
        start_s: `time.perf_counter()` at the request.

    Raises:
        ValueError: The speech exceeds the size of a wav file.
        OSError: The output cannot be written.
    """
    num_samples, sample_rate, first_chunk_s = 0, 24_000, 0.0
    writer = WavWriter(path, sample_rate) if path is not None else None
    progress = tqdm(
        unit="s", desc="speaking", disable=None, bar_format="{desc} {n:.1f} s [{elapsed}]"
    )
    try:
        with progress, closing(chunks):
            while True:
                try:
                    chunk = next(chunks)
                except StopIteration as end:
                    return WrittenSpeech(num_samples / sample_rate, first_chunk_s, end.value)
                first_chunk_s = first_chunk_s or time.perf_counter() - start_s
                if writer is not None:
                    writer.write(chunk.pcm)
                else:
                    sys.stdout.buffer.write(chunk.pcm.astype("<i2").tobytes())
                    sys.stdout.buffer.flush()
                num_samples, sample_rate = num_samples + len(chunk.pcm), chunk.sample_rate
                progress.update(len(chunk.pcm) / sample_rate)
    finally:
        if writer is not None:
            writer.close()
