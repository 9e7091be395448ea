"""Speech whose words' times are known: what a calibration may be told.

A JSON file:

    {"format": "megakernel-tts-word-times-1",
     "speeches": [{"text": "Good morning.", "voice": "clara",
                   "codes": [[17, 203, ...], ...],
                   "starts": [0.06, 0.41]}, ...]}

`codes` are the speech's frames by the checkpoint's own codec: of a recording, or of what the model
said itself. `starts` are seconds from the first frame, one for each word; `voice` may be left out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.model.fields import Fields, read_json

FORMAT = "megakernel-tts-word-times-1"


@dataclass(frozen=True)
class TimedSpeech:
    """Something that was said.

    Attributes:
        text: What.
        voice: A named voice; None is the model's first.
        codes: [frames, groups].
        starts: When each word begins, in seconds; None if nobody knows.
    """

    text: str
    voice: str | None
    codes: NDArray[np.int64]
    starts: list[float] | None


def read_truth(file: Path, groups: int, codes: int) -> list[TimedSpeech]:
    """Reads speech with known word times.

    Args:
        file: In the format above.
        groups: Codes of a frame.
        codes: Entries of a codebook.

    Raises:
        CheckpointError: The file is broken or of another codec: names the speech and the field.
    """
    fields = Fields(read_json(file), file)
    fields.choice("format", (FORMAT,))
    speeches = fields.values.get("speeches")
    if not isinstance(speeches, list) or not speeches:
        raise fields.invalid("speeches", "a list of speeches")
    return [
        _speech(Fields(values, file, f"speeches[{i}]."), groups, codes)
        for i, values in enumerate(speeches)
    ]


def _speech(fields: Fields, groups: int, codes: int) -> TimedSpeech:
    text, voice = fields.values.get("text"), fields.values.get("voice")
    if not isinstance(text, str) or not text.strip():
        raise fields.invalid("text", "what was said")
    if not isinstance(voice, str | None):
        raise fields.invalid("voice", "a voice's name")
    frames = _numbers(fields.values.get("codes"), 2)
    fits = frames is not None and frames.shape[1:] == (groups,) and len(frames) > 1
    if frames is None or not fits or frames.min() < 0 or frames.max() >= codes:
        raise fields.invalid("codes", f"frames of {groups} codes below {codes}")
    starts = _numbers(fields.values.get("starts"), 1)
    if starts is None or not (np.isfinite(starts).all() and (np.diff(starts) >= 0).all()):
        raise fields.invalid("starts", "rising seconds, one for each word")
    return TimedSpeech(text, voice, frames.astype(np.int64), starts.tolist())


def _numbers(values: Any, dimensions: int) -> NDArray[Any] | None:
    """An array, if the values are one of numbers and of so many dimensions."""
    try:
        array = np.array(values)
    except ValueError:  # lists of different lengths
        return None
    fine = array.ndim == dimensions and array.dtype.kind in ("i" if dimensions == 2 else "if")
    return array if fine else None
