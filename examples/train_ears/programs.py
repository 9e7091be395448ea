"""Speaks texts of the corpus with the programs flite and espeak-ng, if they are installed.

python -m examples.train_ears.programs WORK --texts 20000
"""

import argparse
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray
from tqdm import tqdm

from examples.train_ears.layout import Work
from examples.train_ears.synthesis import write_shard
from examples.train_voice.layout import summary
from megakernel_stt.model.config import SAMPLE_RATE

_SHARD = 4000
_SHARES = {"flite": 3, "espeak-ng": 1}  # espeak-ng is the less natural one
_FLITE_VOICES = ("slt", "rms", "awb", "kal16")
_ESPEAK_VOICES = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-029")
_ESPEAK_VARIANTS = ("", "+m1", "+m3", "+m5", "+m7", "+f1", "+f2", "+f3", "+f4", "+f5")


@dataclass(frozen=True)
class Speaker:
    """A voice of a program.

    Attributes:
        program: `flite` or `espeak-ng`.
        voice: Its name there.
        pitch: 0 to 99, for espeak-ng.
    """

    program: str
    voice: str
    pitch: int

    def command(self, text: str, file: Path) -> list[str]:
        """The command that writes a WAV file."""
        if self.program == "flite":
            return ["flite", "-voice", self.voice, "-t", text, "-o", str(file)]
        return ["espeak-ng", "-v", self.voice, "-p", str(self.pitch), "-w", str(file), text]


def draw_speaker(programs: list[str], rng: random.Random) -> Speaker:
    """A random voice of the installed programs."""
    (program,) = rng.choices(programs, [_SHARES[name] for name in programs])
    if program == "flite":
        return Speaker(program, rng.choice(_FLITE_VOICES), 50)
    voice = rng.choice(_ESPEAK_VOICES) + rng.choice(_ESPEAK_VARIANTS)
    return Speaker(program, voice, rng.randint(25, 75))


def speak(folder: Path, job: tuple[int, str, Speaker]) -> NDArray[np.float32]:
    """Speaks a text.

    Args:
        folder: For a temporary file.
        job: Number of the text, the text and the voice.

    Returns:
        float32 [samples] at 16 kHz.

    Raises:
        subprocess.CalledProcessError: The program failed.
    """
    number, text, speaker = job
    file = folder / f"{number}.wav"
    subprocess.run(speaker.command(text, file), check=True, capture_output=True)
    wave, rate = soundfile.read(file, dtype="float32")
    file.unlink()
    return soxr.resample(wave, rate, SAMPLE_RATE)


def synthesise(work: Work, programs: list[str], texts: int, seed: int) -> Iterator[float]:
    """Speaks the targets of random texts; yields the duration of each new shard in seconds."""
    work.recordings.mkdir(exist_ok=True)
    rng = random.Random(seed)
    targets = work.targets.read_text(encoding="utf-8").splitlines()
    chosen = rng.sample(range(len(targets)), min(texts, len(targets)))
    jobs = [(i, targets[i], draw_speaker(programs, rng)) for i in chosen]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        for first in range(0, len(jobs), _SHARD):
            part = jobs[first : first + _SHARD]
            file = work.recordings / f"programs-{first // _SHARD:05d}.npz"
            if file.exists():
                continue
            waves = pool.map(partial(speak, Path(folder)), part)
            found = [*tqdm(waves, total=len(part), desc=file.stem, disable=None)]
            yield write_shard(file, found, [i for i, _, _ in part])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `text`")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    programs = [name for name in _SHARES if shutil.which(name)]
    if not programs:
        parser.error(f"none of {', '.join(_SHARES)} is installed")
    spoken = synthesise(Work(options.work), programs, options.texts, options.seed)
    print(f"{sum(spoken) / 3600:.2f} hours of new speech by {' and '.join(programs)}")


if __name__ == "__main__":
    main()
