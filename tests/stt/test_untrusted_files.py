"""Every field of every configuration of a recogniser, replaced by other types and ranges."""

import datetime
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megakernel_common.errors import CheckpointError
from megakernel_stt.model import nemo
from megakernel_stt.model.config import read_model_config
from megakernel_stt.model.nemo import NemoArchive
from megakernel_stt.model.random_checkpoint import Kind, write_archive
from megakernel_stt.text.tokenizer import Tokenizer
from tests.stt.conftest import MakeCheckpoint
from tests.stt.test_checkpoint import repack
from tests.untrusted import JUNK, MISSING, changed, paths

KINDS: list[Kind] = ["multilingual", "tdt"]  # which have all fields of the four kinds
YAML_JUNK = [*JUNK, datetime.date(2026, 1, 1), b"x", {1, 2}, {1: 2}, {None: 3}]
# Lists of ten references to the next one, 10^12 values in all, and a list that holds itself.
REFERENCES = {
    "many": "\n".join(
        ["a0: &a0 x", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 13))]
    )
    + "\nencoder: *a12",
    "circular": "encoder: &a [*a]",
}


def check_every_value(
    content: Any, read: Callable[[Any], object], path: Path, junk: Sequence[object] = JUNK
) -> None:
    """Reads a content with every value replaced by every junk; errors must name the path."""
    values = [changed(content, place, one) for place in paths(content) for one in junk]
    num_refused = 0
    for value in values + [one for one in junk if one is not MISSING]:
        try:
            read(value)
        except CheckpointError as error:
            assert str(path) in str(error)
            num_refused += 1
        except Exception as error:
            pytest.fail(f"{value!r:.2000}: {error!r}")
    assert num_refused > len(values) / 2


@pytest.fixture
def folder(recogniser: MakeCheckpoint, tmp_path: Path, kind: Kind) -> Path:
    return Path(shutil.copytree(recogniser(kind), tmp_path / "model"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "processor_config.json"])
def test_any_value_of_a_folders_configuration_is_read_or_refused(folder: Path, name: str) -> None:
    def read(content: Any) -> None:
        (folder / name).write_text(json.dumps(content))
        read_model_config(folder)

    check_every_value(json.loads((folder / name).read_text()), read, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_of_an_archives_configuration_is_read_or_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.nemo"
    write_archive(file, folder)
    with tarfile.open(file) as archive:
        member = archive.extractfile("./model_config.yaml")
        assert member is not None
        content = yaml.safe_load(member.read())
    archive = NemoArchive(file)

    def read(content: Any) -> None:
        """The library takes milliseconds for a text, and is tested with damaged texts elsewhere."""
        monkeypatch.setattr(nemo.yaml, "safe_load", lambda _: content)
        archive.config()

    check_every_value(content, read, file, YAML_JUNK)


@pytest.mark.parametrize("kind", KINDS[:1])
@pytest.mark.parametrize("references", REFERENCES)
def test_references_in_an_archives_configuration_are_not_followed(
    folder: Path, tmp_path: Path, references: str
) -> None:
    write_archive(tmp_path / "model.nemo", folder)
    repack(
        tmp_path / "model.nemo",
        lambda content: content.update({"./model_config.yaml": REFERENCES[references].encode()}),
    )
    with pytest.raises(CheckpointError, match=r"encoder\. must be a JSON object, found"):
        NemoArchive(tmp_path / "model.nemo").config()


@pytest.mark.parametrize("kind", KINDS[:1])
def test_any_value_of_a_tokenizer_is_read_or_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    vocab_size = read_model_config(folder).transducer.vocab_size

    def read(content: Any) -> None:
        file.write_text(json.dumps(content))
        Tokenizer.from_folder(folder, vocab_size, vocab_size - 1)

    content = json.loads(file.read_text())
    check_every_value(content, read, file)
