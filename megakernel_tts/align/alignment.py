"""Which heads of a checkpoint look along the text: `alignment.json`, beside its `config.json`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megakernel_tts.align.estimate import EstimatedWordTimer
from megakernel_tts.align.word_times import AlignedWordTimer, WordTimer
from megakernel_tts.align.words import Transcript
from megakernel_tts.model.fields import Fields, read_json

ALIGNMENT_FILE = "alignment.json"
MAX_HEADS = 8  # that the kernel watches at once
MAX_LOOKAHEAD = 4  # frames
_FORMAT = "megakernel-tts-alignment-1"


@dataclass(frozen=True)
class Alignment:
    """How the words of a checkpoint's speech are found.

    Attributes:
        heads: Layer and head of the talker, of each head that is watched.
        floor: The least attention that counts; see `attention.columns`.
        lookahead: Frames that must be known after a word's first one to tell when it begins.
        made: How it was calibrated, for the reader.
    """

    heads: tuple[tuple[int, int], ...]
    floor: float
    lookahead: int
    made: dict[str, Any]

    def save(self, file: Path) -> None:
        """Writes the file."""
        fields = {"format": _FORMAT, **asdict(self)}
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_alignment(file: Path, layers: int, heads: int) -> Alignment | None:
    """Reads the file, if there is one.

    Args:
        file: The file.
        layers: Of the talker.
        heads: Of each of its layers.

    Raises:
        CheckpointError: It is broken, or not of this talker.
    """
    if not file.exists():
        return None
    fields = Fields(read_json(file), file)
    fields.choice("format", (_FORMAT,))
    pairs = fields.values.get("heads")
    expected = f"up to {MAX_HEADS} pairs of a layer below {layers} and a head below {heads}"
    if not isinstance(pairs, list) or not 1 <= len(pairs) <= MAX_HEADS:
        raise fields.invalid("heads", expected)
    for pair in pairs:
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not (whole and 0 <= pair[0] < layers and 0 <= pair[1] < heads):
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
    alignment: Alignment | None, transcript: Transcript, rate: int, text_start: int
) -> WordTimer:
    """What follows a piece: by attention where it was calibrated, else by an estimate.

    Args:
        alignment: Of the checkpoint.
        transcript: The piece's text.
        rate: Samples a second.
        text_start: The position of its first token.
    """
    if alignment is None:
        return EstimatedWordTimer(transcript, rate)
    return AlignedWordTimer(transcript, rate, text_start, alignment.floor)
