"""Folders of transformers and NeMo archives; what is refused, and how."""

import io
import json
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megakernel_common.checkpoint import leaves
from megakernel_common.errors import CheckpointError
from megakernel_stt.model.checkpoint import load_model
from megakernel_stt.model.config import read_model_config
from megakernel_stt.model.hub import find_model
from megakernel_stt.model.nemo import NemoArchive
from megakernel_stt.model.random_checkpoint import (
    RELEASED_SIZE,
    Kind,
    Size,
    write_archive,
    write_checkpoint,
)
from megakernel_stt.model.weights import model_specs
from tests.stt.conftest import CPU, MakeCheckpoint

KINDS: list[Kind] = ["streaming", "multilingual", "rnnt", "tdt"]


@pytest.fixture
def folder(recogniser: MakeCheckpoint, tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may modify."""
    return Path(shutil.copytree(recogniser(), tmp_path / "model"))


@pytest.fixture
def archive(recogniser: MakeCheckpoint, tmp_path: Path) -> Path:
    write_archive(tmp_path / "model.nemo", recogniser())
    return tmp_path / "model.nemo"


def refusal(path: Path) -> str:
    """The message with which loading fails."""
    with pytest.raises(CheckpointError) as caught:
        load_model(path, CPU, torch.float32)
    return str(caught.value)


def edit_json(file: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def repack(file: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Changes members of an archive, by the end of their names."""
    with tarfile.open(file) as source:
        content = {m.name: source.extractfile(m).read() for m in source.getmembers()}  # type: ignore[union-attr]
    change(content)
    with tarfile.open(file, "w:") as target:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            target.addfile(member, io.BytesIO(data))


def edit_yaml(file: Path, change: Callable[[Any], object]) -> None:
    def edit(content: dict[str, bytes]) -> None:
        values = yaml.safe_load(content["./model_config.yaml"])
        change(values)
        content["./model_config.yaml"] = yaml.safe_dump(values).encode()

    repack(file, edit)


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_loads_as_the_folder_of_the_same_weights(kind: Kind, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "folder", kind, bias=kind != "streaming")
    write_archive(tmp_path / "model.nemo", tmp_path / "folder")
    one = load_model(tmp_path / "folder", CPU, torch.float32)
    other = load_model(tmp_path / "model.nemo", CPU, torch.float32)
    assert one.config == other.config
    assert one.tokenizer.pieces[:-1] == other.tokenizer.pieces[:-1]  # all but that of blank
    ids = range(one.config.transducer.vocab_size)
    assert [one.tokenizer.bytes_of(i) for i in ids] == [other.tokenizer.bytes_of(i) for i in ids]
    pairs = list(zip(leaves(one.weights), leaves(other.weights), strict=True))
    assert pairs and all(torch.equal(a, b) for a, b in pairs)
    in_folder = load_model(tmp_path, CPU, torch.float32)  # the only archive of a folder
    assert in_folder.config == other.config
    (tmp_path / "config.json").write_text("{}")  # of the archive's repository
    assert load_model(tmp_path, CPU, torch.float32).config == other.config


def test_the_released_size_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "streaming", Size(num_layers=1, hidden_size=64, vocab_size=1025))
    edit_json(
        tmp_path / "config.json",
        lambda c: (
            c.update(decoder_hidden_size=640),
            c["encoder_config"].update(
                hidden_size=1024, intermediate_size=4096, num_attention_heads=8,
                num_hidden_layers=24, subsampling_conv_channels=256,
            ),
        ),
    )  # fmt: skip
    shapes = [leaf.shape for leaf in leaves(model_specs(read_model_config(tmp_path)))]
    total = sum(torch.Size(shape).numel() for shape in shapes)
    assert round(total / 1e6, 1) == 618.1
    assert RELEASED_SIZE.vocab_size == 1025


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "whisper"),
        ("vocab_size", 1),
        ("vocab_size", "64"),
        ("blank_token_id", 64),
        ("hidden_act", "gelu"),
        ("max_symbols_per_step", 0),
        ("encoder_config", None),
        ("encoder_config.num_attention_heads", 3),
        ("encoder_config.conv_kernel_size", 8),
        ("encoder_config.subsampling_factor", 4),
        ("encoder_config.num_mel_bins", 80),
        ("encoder_config.scale_input", 1),
        ("encoder_config.sliding_window", True),
        ("encoder_config.num_hidden_layers", 10**9),
    ],
)
def test_an_impossible_value_is_refused_by_name(folder: Path, field: str, value: object) -> None:
    def change(config: Any) -> None:
        *path, name = field.split(".")
        for part in path:
            config = config[part]
        config[name] = value

    edit_json(folder / "config.json", change)
    message = refusal(folder)
    # The number of mel bins is compared with that of the features.
    assert field.rsplit(".", 1)[-1] in message or "feature_size" in message


@pytest.mark.parametrize("lookaheads", [[], [1, 1], [-1], ["1"], 3, [1000]])
def test_impossible_lookaheads_are_refused(folder: Path, lookaheads: object) -> None:
    edit_json(
        folder / "processor_config.json",
        lambda c: c.update(supported_num_lookahead_tokens=lookaheads),
    )
    assert "supported_num_lookahead_tokens" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hop_length", 128), ("sampling_rate", 8000), ("mel_filters_dtype", "bfloat16")],
)
def test_other_features_are_refused(folder: Path, field: str, value: object) -> None:
    file = folder / "processor_config.json"
    edit_json(file, lambda c: c["feature_extractor"].update({field: value}))
    assert field in refusal(folder)


def test_features_may_be_in_a_file_of_their_own(folder: Path) -> None:
    content = json.loads((folder / "processor_config.json").read_text())
    features = content.pop("feature_extractor")
    (folder / "processor_config.json").unlink()
    assert "preprocessor_config.json" in refusal(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(features))
    model = load_model(folder, CPU, torch.float32)
    assert model.config.encoder.streaming is not None
    assert model.config.encoder.streaming.lookaheads == (0, 1, 6, 13)  # transformers' default


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_or_damaged_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"{")
    assert name in refusal(folder)
    (folder / name).unlink()
    assert name in refusal(folder)


def test_a_small_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", size=Size(vocab_size=50))
    shutil.copy(tmp_path / "other" / "tokenizer.json", folder)
    assert "no token of id 50" in refusal(folder)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("encoder", "n_heads", 3),
        ("encoder", "subsampling", "striding"),
        ("encoder", "att_context_style", "regular"),
        ("encoder", "att_context_size", [70, 1, 2]),
        ("encoder", "att_context_size", [[70, 1], [56, 0]]),
        ("encoder", "d_model", "${model_defaults.enc_hidden}"),
        ("encoder", "conv_norm_type", "batch_norm"),
        ("preprocessor", "normalize", "per_feature"),
        ("preprocessor", "window_stride", 0.02),
        ("decoder", "blank_as_pad", False),
        ("joint", "num_classes", 0),
        ("joint", "num_extra_outputs", 5),
    ],
)
def test_an_impossible_value_of_an_archive_is_refused(
    archive: Path, section: str, field: str, value: object
) -> None:
    edit_yaml(archive, lambda c: c[section].update({field: value}))
    message = refusal(archive)
    assert field in message or "durations" in message


class Malicious:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("code of the file ran",))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_an_archive_does_not_run(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = io.BytesIO()
    torch.save({"encoder": Malicious()}, weights)
    repack(archive, lambda c: c.update({"./model_weights.ckpt": weights.getvalue()}))
    assert "model_weights.ckpt" in refusal(archive)
    repack(archive, lambda c: c.update({"./model_weights.ckpt": pickle.dumps(Malicious(), 2)}))
    assert "model_weights.ckpt" in refusal(archive)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", ["./model_config.yaml", "./model_weights.ckpt", "tokenizer"])
def test_a_missing_or_damaged_member_is_refused(archive: Path, name: str) -> None:
    name = "./0a1b2c_tokenizer.model" if name == "tokenizer" else name
    repack(archive, lambda c: c.update({name: b"{"}))
    assert name.removeprefix("./").removeprefix("0a1b2c_") in refusal(archive)
    repack(archive, lambda c: c.pop(name))
    assert "missing from the archive" in refusal(archive)


def test_missing_and_misshapen_tensors_of_an_archive_are_named(archive: Path) -> None:
    def edit(content: dict[str, bytes]) -> None:
        tensors = torch.load(io.BytesIO(content["./model_weights.ckpt"]), weights_only=True)
        tensors["joint.enc.weight"] = tensors["joint.enc.weight"][1:]
        data = io.BytesIO()
        torch.save(tensors, data)
        content["./model_weights.ckpt"] = data.getvalue()

    repack(archive, edit)
    assert "joint.enc.weight has shape [15, 32]" in refusal(archive)
    with pytest.raises(CheckpointError, match="no dictionary"):
        data = io.BytesIO()
        torch.save(torch.zeros(2), data)
        repack(archive, lambda c: c.update({"./model_weights.ckpt": data.getvalue()}))
        load_model(archive, CPU, torch.float32)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_changed_byte_raises_nothing_but_a_checkpoint_error(
    archive: Path, at: float, byte: int
) -> None:
    data = bytearray(archive.read_bytes())
    data[int(at * len(data))] = byte
    changed = archive.with_name("changed.nemo")
    changed.write_bytes(data)
    try:
        load_model(changed, CPU, torch.float32)
    except CheckpointError as error:
        assert str(changed) in str(error)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "found: none" in refusal(tmp_path)
    (tmp_path / "a.nemo").write_bytes(b"")
    (tmp_path / "b.nemo").write_bytes(b"")
    assert "a.nemo, b.nemo" in refusal(tmp_path)
    assert "uncompressed tar" in refusal(tmp_path / "a.nemo")


def test_names_of_models(tmp_path: Path, archive: Path) -> None:
    assert find_model(archive) == archive and find_model(str(tmp_path)) == tmp_path
    for name in ("", "no such model", "./missing", "a/b/c"):
        with pytest.raises(CheckpointError, match="not a recognition model"):
            find_model(name)


def test_a_hub_id_downloads_safetensors_or_else_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[tuple[str, str | None, list[str]]] = []

    def download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        requested.append((repository, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("nvidia/x@refs/pr/17") == tmp_path
    assert [patterns for *_, patterns in requested] == [["*.json", "*.safetensors"], ["*.nemo"]]
    assert {(repository, revision) for repository, revision, _ in requested} == {
        ("nvidia/x", "refs/pr/17")
    }
    (tmp_path / "model.safetensors").touch()
    requested.clear()
    find_model("nvidia/x")
    assert len(requested) == 1


def test_an_archive_is_read_in_place(archive: Path) -> None:
    before = set(archive.parent.iterdir())
    NemoArchive(archive).config()
    load_model(archive, CPU, torch.float32)
    assert set(archive.parent.iterdir()) == before
