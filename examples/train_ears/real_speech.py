"""Real recordings with their texts, from Debian packages that `get_recordings.sh` downloads.

| package | content | licence |
| --- | --- | --- |
| asterisk-core-sounds-en, asterisk-core-sounds-en-g722 | prompts, one studio voice | CC-BY-SA-3.0 |
| pocketsphinx-testdata | five clips of LibriVox | public domain |

They are for evaluation only: nothing of them is in this repository or in the checkpoint.
"""

import gzip
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from examples.train_ears.targets import plain
from megakernel_stt.model.config import SAMPLE_RATE

_ASTERISK = "usr/share/asterisk/sounds"
_PROMPTS = "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
_LIBRIVOX = "usr/share/pocketsphinx/test/data/librivox"
_UNUSABLE = re.compile(r"[\[(\d]|beep|music|tone")  # sounds, comments and digits
_LEAST_WORDS = 5  # of a prompt


@dataclass(frozen=True)
class Recording:
    """Speech and what is said.

    Attributes:
        name: Of its file.
        wave: int16 [samples] at 16 kHz.
        text: Lower-case words.
    """

    name: str
    wave: NDArray[np.int16]
    text: str


def asterisk(root: Path) -> list[Recording]:
    """Asterisk's prompts of five words or more.

    Args:
        root: Folder of the packages' files.

    Raises:
        FileNotFoundError: The packages are missing there.
    """
    sounds = sorted((root / _ASTERISK).glob("en_US*"))
    if not sounds or not (root / _PROMPTS).exists():
        raise FileNotFoundError(f"{root / _ASTERISK}: no prompts; run get_recordings.sh first.")
    with gzip.open(root / _PROMPTS, "rt", encoding="utf-8", errors="ignore") as file:
        lines = [line.partition(":") for line in file if not line.startswith(";")]
    found: list[Recording] = []
    for name, _, text in lines:
        path = sounds[0] / f"{name.strip()}.g722"
        words = plain(text)
        if path.exists() and not _UNUSABLE.search(text) and len(words.split()) >= _LEAST_WORDS:
            found.append(Recording(name.strip(), _decode_g722(path), words))
    return found


def _decode_g722(file: Path) -> NDArray[np.int16]:
    import av

    with av.open(str(file), format="g722") as container:
        frames: list[Any] = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    return np.concatenate(frames)


def librivox(root: Path) -> list[Recording]:
    """Clips of a reading of Sense and Sensibility.

    Args:
        root: Folder of the package's files.

    Raises:
        FileNotFoundError: The package is missing there.
    """
    folder = root / _LIBRIVOX
    found: list[Recording] = []
    for line in (folder / "transcription").read_text(encoding="utf-8").splitlines():
        match = re.match(r"(?:<s> )?(.*?)(?: </s>)? *\((.*)\)", line.strip())
        if match is None:
            continue
        wave, rate = soundfile.read(folder / f"{match[2]}.wav", dtype="int16")
        assert rate == SAMPLE_RATE
        found.append(
            Recording(match[2], wave.astype(np.int16), plain(match[1].replace("<sil>", "")))
        )
    return found
