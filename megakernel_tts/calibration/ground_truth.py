"""Ground truth for a calibration: speech with known word times, in a JSON file.

    {"format": "megakernel-tts-word-times-1",
     "speeches": [{"text": "Good morning.", "voice": "clara",
                   "codes": [[17, 203, ...], ...],
                   "starts": [0.06, 0.41]}, ...]}

`codes` are frames of the checkpoint's codec, of a recording or of the model's own speech. `starts`
has the start of each word in seconds from the first frame. `voice` is optional.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel_common.fields import Fields, read_json

FORMAT = "megakernel-tts-word-times-1"


@dataclass(frozen=True)
class TimedSpeech:
    """A speech, with or without word times.

    Attributes:
        text: The spoken text.
        voice: A named voice; None selects the voice of the calibration.
        codes: [frames, num_groups].
        starts: The start of each word in seconds; None if unknown.
    """

    text: str
    voice: str | None
    codes: NDArray[np.int64]
    starts: list[float] | None


def read_truth(file: Path, num_groups: int, num_codes: int) -> list[TimedSpeech]:
    """Reads speech with known word times.

    Args:
        file: In the format above.
        num_groups: Codes of a frame.
        num_codes: Entries of a codebook.

    Raises:
        CheckpointError: The file is invalid or of another codec; names the speech and the field.
    """
    fields = Fields(read_json(file), file)
    fields.choice("format", (FORMAT,))
    speeches = fields.values.get("speeches")
    if not isinstance(speeches, list) or not speeches:
        raise fields.invalid("speeches", "a list of speeches")
    return [
        _speech(Fields(values, file, f"speeches[{i}]."), num_groups, num_codes)
        for i, values in enumerate(speeches)
    ]


def _speech(fields: Fields, num_groups: int, num_codes: int) -> TimedSpeech:
    text, voice = fields.values.get("text"), fields.values.get("voice")
    if not isinstance(text, str) or not text.strip():
        raise fields.invalid("text", "the spoken text")
    if not isinstance(voice, str | None):
        raise fields.invalid("voice", "a voice's name")
    frames = _numbers(fields.values.get("codes"), 2)
    fits = frames is not None and frames.shape[1:] == (num_groups,) and len(frames) > 1
    if frames is None or not fits or frames.min() < 0 or frames.max() >= num_codes:
        raise fields.invalid("codes", f"frames of {num_groups} codes below {num_codes}")
    starts = _numbers(fields.values.get("starts"), 1)
    if starts is None or not (np.isfinite(starts).all() and (np.diff(starts) >= 0).all()):
        raise fields.invalid("starts", "increasing seconds, one for each word")
    return TimedSpeech(text, voice, frames.astype(np.int64), starts.tolist())


def _numbers(values: Any, num_dimensions: int) -> NDArray[Any] | None:
    """An array of numbers (two dimensions: integers); None if the values are something else."""
    try:
        array = np.array(values)
    except ValueError:  # lists of different lengths
        return None
    kinds = "i" if num_dimensions == 2 else "if"
    return array if array.ndim == num_dimensions and array.dtype.kind in kinds else None
