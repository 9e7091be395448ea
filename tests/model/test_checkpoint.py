import contextlib
import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from examples.train_ears.export import quantise
from megakernel_common.checkpoint import Checkpoint, leaves, map_leaves
from megakernel_common.errors import CheckpointError
from megakernel_tts import TTS, Sampling, SynthesisError
from megakernel_tts.loader import load_checkpoint
from megakernel_tts.model.config import read_model_config
from megakernel_tts.model.weights import Model, model_specs

CPU = torch.device("cpu")


@pytest.fixture
def folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may modify."""
    return Path(shutil.copytree(checkpoint(), tmp_path / "model"))


def specs(folder: Path) -> Model:
    return model_specs(read_model_config(folder / "config.json"))


def refusal(folder: Path) -> str:
    """The message with which loading fails."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, CPU, torch.float32, 1).engine.close()
    return str(caught.value)


def resave(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(str(file))
    change(tensors)
    save_file(tensors, str(file))


def test_int8_matrices_are_multiplied_by_their_scales(folder: Path) -> None:
    """Each number of a matrix differs by half a step of its row; vectors do not differ."""
    whole = Checkpoint(folder).load(specs(folder), CPU, torch.float32)

    def reduce(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            tensors |= quantise(name, tensor)

    resave(folder, reduce)
    loaded = Checkpoint(folder)
    assert loaded.has_int8
    pairs = zip(leaves(whole), leaves(loaded.load(specs(folder), CPU, torch.float32)), strict=True)
    matrices = 0
    for one, other in pairs:
        if one.ndim == 1:
            assert torch.equal(one.half().float(), other)
            continue
        rows, others, matrices = one.flatten(1), other.flatten(1), matrices + 1
        steps = rows.abs().amax(1, keepdim=True) / 127
        assert ((rows - others).abs() <= 0.51 * steps).all()
    assert matrices > 10


def test_int8_vectors_are_refused(folder: Path) -> None:
    name = next(leaf.name for leaf in leaves(specs(folder)) if len(leaf.shape) == 1)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}_scale"] = tensors[name].half()
        tensors[name] = tensors[name].to(torch.int8)

    resave(folder, spoil)
    assert f"{name} is of type I8; expected one of" in refusal(folder)


@pytest.mark.parametrize("kind", ["missing", "short", "int8"])
def test_int8_matrices_without_their_scales_are_refused(folder: Path, kind: str) -> None:
    name = next(leaf.name for leaf in leaves(specs(folder)) if len(leaf.shape) == 2)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= quantise(name, tensors[name])
        scale = tensors.pop(f"{name}_scale")
        if kind != "missing":
            tensors[f"{name}_scale"] = scale[1:] if kind == "short" else scale.to(torch.int8)

    resave(folder, spoil)
    assert f"so {name}_scale must have" in refusal(folder)


def test_sharded_checkpoint_loads_the_same_tensors(folder: Path) -> None:
    whole = Checkpoint(folder).load(specs(folder), CPU, torch.float32)
    tensors = load_file(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({n: tensors[n] for n in part}, str(folder / shard))
    index = {"weight_map": {n: shard for shard, part in shards.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = Checkpoint(folder).load(specs(folder), CPU, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(leaves(whole), leaves(sharded), strict=True))
    (folder / "b.safetensors").unlink()
    assert "b.safetensors" in refusal(folder) and "missing" in refusal(folder)
    index["weight_map"][names[0]] = "../../etc/passwd"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "passwd" in refusal(folder)


def test_tensor_with_wrong_name_shape_or_dtype_is_refused(folder: Path) -> None:
    name = "talker.model.layers.1.mlp.up_proj.weight"

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    resave(folder, drop)
    assert f"{name} is missing" in refusal(folder)
    resave(folder, lambda t: t.update({name: torch.zeros(3, 5)}))
    message = refusal(folder)
    assert "[3, 5]" in message and "expected [384, 128]" in message and name in message
    resave(folder, lambda t: t.update({name: torch.zeros(384, 128, dtype=torch.int8)}))
    assert "I8" in refusal(folder) and "BF16, F16, F32" in refusal(folder)


@pytest.mark.parametrize(
    "file",
    [
        "config.json", "model.safetensors", "vocab.json", "merges.txt",
        "speech_tokenizer/config.json", "speech_tokenizer/model.safetensors",
    ],
)  # fmt: skip
def test_missing_file_is_refused_by_name(folder: Path, file: str) -> None:
    (folder / file).unlink()
    message = refusal(folder)
    assert file in message and "missing" in message


FILES = [
    "config.json", "generation_config.json", "vocab.json", "merges.txt", "model.safetensors",
    "speech_tokenizer/config.json", "speech_tokenizer/model.safetensors",
]  # fmt: skip


MAX_CPU_SECONDS = 1  # in which a damaged checkpoint must be refused


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _sparse(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


def _replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


def _socket(file: Path) -> None:
    with contextlib.chdir(file.parent), socket.socket(socket.AF_UNIX) as unix_socket:
        unix_socket.bind(file.name)  # a full path may exceed the limit of socket names


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate,
    "empty": lambda file: file.write_bytes(b""),
    "binary": lambda file: file.write_bytes(bytes(range(256)) * 64),
    "null": lambda file: file.write_text("null"),
    "list": lambda file: file.write_text("[1, 2]"),
    "string": lambda file: file.write_text('"x"'),
    "nested": lambda file: file.write_text("[" * 100_000),
    "digits": lambda file: file.write_text("9" * 100_000),
    "a tebibyte": _sparse,
    "pipe": _replaced_by(os.mkfifo),
    "folder": _replaced_by(Path.mkdir),
    "socket": _replaced_by(_socket),
    "device": _replaced_by(lambda file: file.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_refused_quickly_and_by_name(folder: Path, file: str, damage: str) -> None:
    DAMAGES[damage](folder / file)
    start_s = time.process_time()
    message = refusal(folder)
    assert str(folder / file) in message
    assert time.process_time() - start_s < MAX_CPU_SECONDS


JUNK = st.sampled_from(
    [None, True, False, -1, 0, 0.5, 1e300, -1e300, 10**30, float("nan"), float("inf"), "", "x",
     "\x00", [], [[]], [None], [10**9] * 20, {}, {"x": None}, {"x": 10**30}]
)  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
@pytest.mark.parametrize(
    "file", ["config.json", "speech_tokenizer/config.json", "generation_config.json", "vocab.json"]
)
def test_any_value_anywhere_in_a_config_is_refused_by_name_or_ignored(
    folder: Path, file: str, data: st.DataObject
) -> None:
    good = (folder / file).read_bytes()
    values = section = json.loads(good)
    key = data.draw(st.sampled_from(sorted(section)))
    while isinstance(section[key], dict) and section[key] and data.draw(st.booleans()):
        section = section[key]
        key = data.draw(st.sampled_from(sorted(section)))
    section[key] = data.draw(JUNK)
    try:
        (folder / file).write_text(json.dumps(values))
        start_s = time.process_time()
        try:
            load_checkpoint(folder, CPU, torch.float32, 1).engine.close()
        except CheckpointError as error:
            assert any(name in str(error) for name in (file, "merges.txt"))
            assert time.process_time() - start_s < MAX_CPU_SECONDS
    finally:
        (folder / file).write_bytes(good)


def test_pickle_files_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "Only safetensors" in refusal(folder)


def test_codec_of_another_model_is_refused(folder: Path, checkpoint: Callable[..., Path]) -> None:
    shutil.rmtree(folder / "speech_tokenizer")
    shutil.copytree(checkpoint(codes=2048) / "speech_tokenizer", folder / "speech_tokenizer")
    assert "2048 entries" in refusal(folder)


def test_base_model_requires_its_speaker_encoder(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("base"), tmp_path / "model"))
    name = "speaker_encoder.fc.weight"
    resave(folder, lambda t: t.update({name: torch.zeros(1)}))
    assert f"{name} has shape [1]" in refusal(folder)


@pytest.mark.parametrize("damage", ["tail", "metadata", "shape", "infinity"])
def test_no_weight_is_loaded_before_every_file_is_verified(
    folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "speech_tokenizer" / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if damage == "tail":
        data += b"x"
    elif damage == "metadata":
        header["__metadata__"] = 5
    else:
        huge = [10**4000] * 300 if damage == "shape" else [float("inf")]
        header["decoder.decoder.0.conv.bias"]["shape"] = huge
    new = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + data)
    monkeypatch.setattr(Checkpoint, "load", lambda *_: pytest.fail("a weight was loaded"))
    assert "speech_tokenizer" in refusal(folder)


def test_nan_in_a_codec_weight_is_a_synthesis_error(folder: Path) -> None:
    file = folder / "speech_tokenizer" / "model.safetensors"
    tensors = load_file(str(file))
    tensors["decoder.pre_conv.conv.weight"][:] = torch.nan
    save_file(tensors, str(file))
    with TTS.load(folder, device="cpu", slots=1) as tts:
        with pytest.raises(SynthesisError, match="not finite"):
            tts.say("hello", sampling=Sampling(max_frames=3))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_truncated_or_corrupted_file_raises_checkpoint_error_only(
    folder: Path, data: st.DataObject
) -> None:
    """The file may also load, if the damage leaves it valid."""
    file = folder / "model.safetensors"
    good = file.read_bytes()
    try:
        header = struct.unpack("<Q", good[:8])[0]
        if data.draw(st.booleans()):
            bad = good[: data.draw(st.integers(0, len(good) - 1))]
        else:
            at = data.draw(st.integers(0, 8 + header - 1))
            bad = good[:at] + data.draw(st.binary(min_size=1, max_size=8)) + good[at + 1 :]
        file.write_bytes(bad)
        try:
            Checkpoint(folder).load(specs(folder), CPU, torch.float32)
        except CheckpointError as error:
            assert "model" in str(error)
        else:
            assert len(bad) >= len(good)
    finally:
        file.write_bytes(good)


def test_map_leaves_keeps_every_leaf(folder: Path) -> None:
    tree = specs(folder)
    names = [leaf.name for leaf in leaves(tree)]
    assert len(names) == len(set(names))
    assert list(leaves(map_leaves(tree, lambda leaf: leaf))) == list(leaves(tree))
