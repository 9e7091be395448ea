import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel_common.errors import CheckpointError
from megakernel_tts.align.alignment import ALIGNMENT_FILE, Alignment, read_alignment
from megakernel_tts.calibration.ground_truth import FORMAT, read_truth
from megakernel_tts.model.hub import find_checkpoint

ALIGNMENT = Alignment(((3, 0), (2, 1)), 1e-4, 3, {"speeches": 12})
SPEECH = {"text": "One two.", "voice": "clara", "codes": [[1, 2], [3, 4]], "starts": [0.0, 0.1]}


def test_saved_alignment_is_read_back(tmp_path: Path) -> None:
    ALIGNMENT.save(tmp_path / ALIGNMENT_FILE)
    assert read_alignment(tmp_path / ALIGNMENT_FILE, num_layers=4, num_heads=2) == ALIGNMENT


def test_missing_file_gives_none(tmp_path: Path) -> None:
    assert read_alignment(tmp_path / ALIGNMENT_FILE, num_layers=4, num_heads=2) is None


def test_demo_voice_has_an_alignment() -> None:
    found = read_alignment(find_checkpoint("demo") / ALIGNMENT_FILE, num_layers=6, num_heads=4)
    assert found is not None and found.made["truth"] is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format is"),
        ({"heads": []}, r"heads is \[\]; expected up to 8 pairs"),
        ({"heads": [[4, 0]]}, "a layer below 4 and a head below 2"),
        ({"heads": [[0, 2]]}, "a head below 2"),
        ({"heads": [[0, 0]] * 9}, "up to 8 pairs"),
        ({"heads": [[True, 0]]}, "heads is"),
        ({"heads": [0, 1]}, "heads is"),
        ({"floor": 0}, "floor is 0"),
        ({"floor": 1.0}, "a share of the attention, below 1"),
        ({"lookahead": 5}, "from 0 to 4"),
        ({"lookahead": 1.5}, "lookahead is 1.5"),
        ({"made": 3}, "must be a JSON object, found 3"),
    ],
)
def test_invalid_file_is_refused_with_name_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    ALIGNMENT.save(tmp_path / ALIGNMENT_FILE)
    values = json.loads((tmp_path / ALIGNMENT_FILE).read_text())
    (tmp_path / ALIGNMENT_FILE).write_text(json.dumps(values | change))
    with pytest.raises(CheckpointError, match=message) as error:
        read_alignment(tmp_path / ALIGNMENT_FILE, num_layers=4, num_heads=2)
    assert ALIGNMENT_FILE in str(error.value)


def _ground_truth(file: Path, **change: Any) -> Path:
    file.write_text(json.dumps({"format": FORMAT, "speeches": [SPEECH, SPEECH | change]}))
    return file


def test_ground_truth_is_read(tmp_path: Path) -> None:
    first, second = read_truth(
        _ground_truth(tmp_path / "t.json", voice=None), num_groups=2, num_codes=5
    )
    assert (first.text, first.voice, first.starts) == ("One two.", "clara", [0.0, 0.1])
    assert second.voice is None and np.array_equal(first.codes, [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": " "}, "text is"),
        ({"voice": 3}, "voice is 3"),
        ({"codes": [[1, 2], [3]]}, "frames of 2 codes below 5"),
        ({"codes": [[1, 2, 3], [3, 4, 4]]}, "frames of 2 codes below 5"),
        ({"codes": [[1, 2], [3, 5]]}, "frames of 2 codes below 5"),
        ({"codes": [[1.5, 2], [3, 4]]}, "codes is"),
        ({"codes": None}, "codes is null"),
        ({"starts": [0.2, 0.1]}, "increasing seconds"),
        ({"starts": "soon"}, "increasing seconds"),
    ],
)
def test_invalid_ground_truth_is_refused_with_the_speech(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        read_truth(_ground_truth(tmp_path / "t.json", **change), num_groups=2, num_codes=5)
    assert "speeches[1]." in str(error.value)
