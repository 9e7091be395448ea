"""Every field of every file of a checkpoint, replaced by values of other types and ranges.

Only `CheckpointError` may escape from a reader. Voice files are tested in `test_voice.py`.
"""

import contextlib
import json
import shutil
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megakernel_common.checkpoint import Checkpoint
from megakernel_common.errors import CheckpointError
from megakernel_tts.align.alignment import ALIGNMENT_FILE, Alignment, read_alignment
from megakernel_tts.calibration.ground_truth import FORMAT, read_truth
from megakernel_tts.codec.weights import decoder_specs, encoder_specs
from megakernel_tts.info import model_info
from megakernel_tts.loader import _check_match, _read_sampling
from megakernel_tts.model.config import (
    CodecConfig,
    ModelConfig,
    read_codec_config,
    read_model_config,
)
from megakernel_tts.model.weights import model_specs, speaker_specs
from megakernel_tts.text.tokenizer import TextTokenizer
from tests.untrusted import JUNK, MISSING, JsonPath, changed, paths

# Fields that may be absent or null, with their types.
OPTIONAL = {"layer_types": list, "rope_scaling": dict, "use_sliding_window": bool, "voice": str}

SPEECH = {"text": "One two.", "voice": "clara", "codes": [[1, 2], [3, 4]], "starts": [0.0, 0.1]}


class RecordedFields(dict[str, Any]):
    """An object of a JSON file that records the paths that are looked up."""

    def __init__(self, values: dict[str, Any], found: set[JsonPath], path: JsonPath = ()) -> None:
        super().__init__(
            {
                key: RecordedFields(value, found, (*path, key))
                if isinstance(value, dict)
                else value
                for key, value in values.items()
            }
        )
        self._path, self._found = path, found

    def __getitem__(self, key: str) -> Any:
        self._found.add((*self._path, key))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._found.add((*self._path, key))
        return super().get(key, default)


@cache
def headers(folder: Path) -> Checkpoint:
    return Checkpoint(folder)


def read_configs(folder: Path) -> tuple[ModelConfig, CodecConfig]:
    config = read_model_config(folder / "config.json")
    codec = read_codec_config(folder / "speech_tokenizer" / "config.json")
    _check_match(folder, config, codec)
    return config, codec


def read_model(folder: Path) -> None:
    config, _ = read_configs(folder)
    speaker = None if config.speaker is None else speaker_specs(config.speaker)
    headers(folder).verify((model_specs(config), speaker))
    model_info(config, folder)


def read_codec(folder: Path) -> None:
    _, codec = read_configs(folder)
    decoder, encoder = decoder_specs(codec.decoder), encoder_specs(codec.encoder, 16)
    headers(folder / "speech_tokenizer").verify((decoder, encoder))


# File -> what reads it in a checkpoint's folder.
READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_model,
    "speech_tokenizer/config.json": read_codec,
    "generation_config.json": lambda folder: _read_sampling(folder / "generation_config.json"),
    "vocab.json": lambda folder: TextTokenizer(folder, 10_000),
    ALIGNMENT_FILE: lambda folder: read_alignment(folder / ALIGNMENT_FILE, 4, 4),
    "truth.json": lambda folder: read_truth(folder / "truth.json", num_groups=2, num_codes=9),
}
MODULES = (
    "model.config",
    "loader",
    "text.tokenizer",
    "align.alignment",
    "calibration.ground_truth",
)


@pytest.fixture
def folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A Base checkpoint, which has all sections, and the other files that are read."""
    folder = Path(shutil.copytree(checkpoint("base"), tmp_path / "model"))
    Alignment(((3, 0), (2, 1)), 1e-4, 3, {"speeches": 12}).save(folder / ALIGNMENT_FILE)
    (folder / "truth.json").write_text(json.dumps({"format": FORMAT, "speeches": [SPEECH] * 2}))
    return folder


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[str], set[JsonPath]]:
    """Returns the paths of a file that are looked up, whether they exist or not."""

    def find(name: str) -> set[JsonPath]:
        found: set[JsonPath] = set()

        def read_json(file: Path) -> RecordedFields:
            content = json.loads(file.read_text(encoding="utf-8"))
            return RecordedFields(content, found if file == folder / name else set())

        with monkeypatch.context() as patch:
            for module in MODULES:
                patch.setattr(f"megakernel_tts.{module}.read_json", read_json)
            READERS[name](folder)
        return found

    return find


@pytest.mark.parametrize("name", READERS)
def test_any_value_of_any_field_is_read_or_refused_as_checkpoint_error(
    folder: Path, found: Callable[[str], set[JsonPath]], name: str
) -> None:
    file = folder / name
    content = json.loads(file.read_text(encoding="utf-8"))
    num_refused = 0
    for path in sorted(found(name).union(paths(content)), key=str):
        for value in JUNK:
            file.write_text(json.dumps(changed(content, path, value)))
            try:
                READERS[name](folder)
            except CheckpointError as error:
                assert str(folder) in str(error)
                num_refused += 1
            except Exception as error:
                pytest.fail(f"{path} = {value!r:.60}: {error!r}")
    assert num_refused > 100


def has_type(value: object, original: object, name: str | int) -> bool:
    """Whether a value has the type of the field: that of its original, or of `OPTIONAL`."""
    expected = OPTIONAL.get(str(name), type(original))
    if expected is float or name == "rope_theta":
        return type(value) in (int, float)
    return type(value) is expected or (value is None and name in OPTIONAL)


@pytest.mark.parametrize("name", [name for name in READERS if name != "vocab.json"])
def test_field_that_is_read_must_have_its_type(
    folder: Path, found: Callable[[str], set[JsonPath]], name: str
) -> None:
    file = folder / name
    content = json.loads(file.read_text(encoding="utf-8"))
    accepted: list[tuple[JsonPath, object]] = []
    for path in found(name):
        original = content
        for key in path:
            original = original.get(key)
        for value in (None, True, 1, 0.5, "x", ["x"], {"rope_type": "x"}):
            default = value is None and name == "generation_config.json"
            if default or has_type(value, original, path[-1]):
                continue
            file.write_text(json.dumps(changed(content, path, value)))
            with contextlib.suppress(CheckpointError):
                READERS[name](folder)
                accepted.append((path, value))
    assert accepted == []


@pytest.mark.parametrize("value", JUNK)
def test_any_root_is_refused(folder: Path, value: object) -> None:
    for name, read in READERS.items():
        # Any object is a valid generation_config.json, since none of its keys are required.
        if value is not MISSING and not (isinstance(value, dict) and name.startswith("generation")):
            content = (folder / name).read_bytes()
            (folder / name).write_text(json.dumps(value))
            with pytest.raises(CheckpointError, match=name.split("/")[-1]):
                read(folder)
            (folder / name).write_bytes(content)


def test_any_value_in_a_safetensors_header_is_read_or_refused(folder: Path) -> None:
    file = folder / "speech_tokenizer" / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    tensors = sorted(header)[:3]
    header = {name: header[name] for name in tensors}
    for path in paths(header):
        for value in JUNK:
            new = json.dumps(changed(header, path, value)).encode()
            file.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])
            with pytest.raises(CheckpointError, match=r"model\.safetensors"):
                Checkpoint(file.parent)


def test_any_value_in_an_index_of_shards_is_read_or_refused(folder: Path) -> None:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names = sorted(load_file(str(single)))[:2]
    single.rename(folder / "a.safetensors")
    content = {"metadata": {"total_size": 5}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    for path in paths(content):
        for value in JUNK:
            index.write_text(json.dumps(changed(content, path, value)))
            with contextlib.suppress(CheckpointError):
                Checkpoint(folder)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_merges_are_read_or_refused(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    source, folder = checkpoint(), tmp_path_factory.getbasetemp() / "merges"
    folder.mkdir(exist_ok=True)
    shutil.copy(source / "vocab.json", folder)
    lines = (source / "merges.txt").read_text(encoding="utf-8").split("\n")
    pieces = st.lists(st.sampled_from(["a", "b", "ab", "Ġ", "", "x" * 99, "\x00", "é", "#"]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = " ".join(data.draw(pieces))
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    with contextlib.suppress(CheckpointError):
        TextTokenizer(folder, 10_000)
