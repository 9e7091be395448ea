"""The calibration of word times: `alignment.json`, in the folder of a checkpoint."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megakernel_common.fields import Fields, read_json
from megakernel_common.files import replace_file
from megakernel_tts.align.estimate import EstimatedWordTimer
from megakernel_tts.align.word_times import AlignedWordTimer, WordTimer
from megakernel_tts.align.words import Transcript
from megakernel_tts.kernels.structs import MAX_CAPTURED_HEADS

ALIGNMENT_FILE = "alignment.json"
MAX_HEADS = MAX_CAPTURED_HEADS
MAX_LOOKAHEAD = 4  # frames
_FORMAT = "megakernel-tts-alignment-1"


@dataclass(frozen=True)
class Alignment:
    """Alignment heads of a checkpoint and the parameters of the search.

    Attributes:
        heads: Layer and head of the talker, for each alignment head.
        floor: Minimum attention; see `unit_log_attention`.
        lookahead: Frames that must exist after a frame before its word times are final.
        made: How the heads were calibrated, for information.
    """

    heads: tuple[tuple[int, int], ...]
    floor: float
    lookahead: int
    made: dict[str, Any]

    def save(self, file: Path) -> None:
        """Writes the file.

        Raises:
            OSError: See `replace_file`.
        """
        fields = {"format": _FORMAT, **asdict(self)}
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
        replace_file(file, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read_alignment(file: Path, num_layers: int, num_heads: int) -> Alignment | None:
    """Reads an `alignment.json`.

    Args:
        file: The file.
        num_layers: Of the talker.
        num_heads: Of each layer of the talker.

    Returns:
        The alignment, or None if the file does not exist.

    Raises:
        CheckpointError: The file is invalid, or does not fit the talker.
    """
    if not file.exists():
        return None
    fields = Fields(read_json(file), file)
    fields.choice("format", (_FORMAT,))
    pairs = fields.values.get("heads")
    expected = f"up to {MAX_HEADS} pairs of a layer below {num_layers} and a head below {num_heads}"
    if not isinstance(pairs, list) or not 1 <= len(pairs) <= MAX_HEADS:
        raise fields.invalid("heads", expected)
    for pair in pairs:
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not (is_pair and 0 <= pair[0] < num_layers and 0 <= pair[1] < num_heads):
            raise fields.invalid("heads", expected)
    floor = fields.number("floor")
    if floor >= 1:
        raise fields.invalid("floor", "a share of the attention, below 1")
    return Alignment(
        tuple((layer, head) for layer, head in pairs),
        floor,
        fields.integer("lookahead", minimum=0, maximum=MAX_LOOKAHEAD),
        fields.section("made").values,
    )


def make_word_timer(
    alignment: Alignment | None, transcript: Transcript, text_start: int
) -> WordTimer:
    """Creates the word timer of a segment.

    Args:
        alignment: Of the checkpoint; without one, times are estimated.
        transcript: Of the segment.
        text_start: Position of the text's first token in the talker's sequence.
    """
    if alignment is None:
        return EstimatedWordTimer(transcript)
    return AlignedWordTimer(transcript, text_start, alignment.floor)
