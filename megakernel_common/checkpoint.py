"""Loads safetensors files into trees of tensors; headers are verified before data is read.

A network is declared once, as a tree of dataclasses with `TensorSpec` leaves: the name of a tensor
in the file, and its shape. `Checkpoint.load` verifies every leaf against the headers and returns
the same tree with tensors as leaves.

A matrix NAME may be stored as int8 numbers with a scale for each row, NAME_scale.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megakernel_common.errors import CheckpointError
from megakernel_common.fields import check_regular, read_json

T = TypeVar("T")

_DTYPES = ("BF16", "F16", "F32")
_INT8 = "I8"
_MAX_HEADER_BYTES = 16 << 20  # a released checkpoint has 60 KB


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape that a tensor must have in the file."""

    name: str
    shape: tuple[int, ...]


def spec(name: str, *shape: int) -> Tensor:
    """A `TensorSpec` leaf, typed as the tensor that replaces it when the tree is loaded."""
    return cast(Tensor, TensorSpec(name, shape))


def map_leaves(tree: T, function: Callable[[Any], Any]) -> T:
    """Applies a function to every leaf of a tree.

    Args:
        tree: Dataclasses and tuples whose leaves are `TensorSpec`s or tensors.
        function: Maps a leaf to its replacement.

    Returns:
        A new tree of the same structure.
    """
    if isinstance(tree, TensorSpec | Tensor):
        return function(tree)
    if isinstance(tree, tuple):
        return cast(T, tuple(map_leaves(item, function) for item in tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        mapped = {f.name: map_leaves(getattr(tree, f.name), function) for f in fields(tree)}
        return replace(tree, **mapped)
    return tree


def leaves(tree: Any) -> Iterator[Any]:
    """All leaves of a tree, in the order of declaration."""
    found: list[Any] = []
    map_leaves(tree, found.append)
    return iter(found)


@dataclass(frozen=True)
class _HeaderEntry:
    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a folder: one `model.safetensors`, or an index with shards."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers only.

        Args:
            folder: Contains `model.safetensors` or `model.safetensors.index.json`.

        Raises:
            CheckpointError: A file is missing, truncated or corrupt.
        """
        self.folder = folder
        self._entries: dict[str, _HeaderEntry] = {}
        for file in self._files():
            self._entries |= _read_header(file)
            try:
                # The library checks its own rules (no gaps, no overlaps) when a file is opened.
                safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: not readable as safetensors ({error}).") from error

    def _files(self) -> list[Path]:
        single = self.folder / "model.safetensors"
        index = self.folder / "model.safetensors.index.json"
        if single.exists():
            check_regular(single)
            return [single]
        if not index.exists():
            raise CheckpointError(
                f"{single}: the file is missing, and so is {index.name}. Only safetensors are "
                "supported."
            )
        content = read_json(index)
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise CheckpointError(
                f"{index}: weight_map must be an object of tensor names and file names."
            )
        names = sorted(set(shards.values()))
        for name in names:
            if Path(name).name != name or len(name) > 255 or not (self.folder / name).is_file():
                raise CheckpointError(f"{index}: the shard {name!r} is missing from {self.folder}.")
        return [self.folder / name for name in names]

    @property
    def has_int8(self) -> bool:
        """Whether a matrix is stored as int8 numbers with scales."""
        return any(
            entry.dtype == _INT8 and f"{name}_scale" in self._entries
            for name, entry in self._entries.items()
        )

    def verify(self, tree: Any) -> None:
        """Checks every leaf of a tree of specs against the headers.

        Raises:
            CheckpointError: A tensor is missing, or has an unexpected shape or dtype.
        """
        for leaf in leaves(tree):
            entry = self._entries.get(leaf.name)
            if entry is None:
                files = ", ".join(file.name for file in self._files())
                raise CheckpointError(
                    f"{self.folder}: the tensor {leaf.name} is missing from {files}; "
                    f"expected shape {list(leaf.shape)} of {', '.join(_DTYPES)}."
                )
            if entry.shape != leaf.shape:
                raise CheckpointError(
                    f"{entry.file}: {leaf.name} has shape {list(entry.shape)}; "
                    f"expected {list(leaf.shape)} from config.json."
                )
            if entry.dtype == _INT8 and len(entry.shape) > 1:
                self._verify_scale(leaf.name, entry)
            elif entry.dtype not in _DTYPES:
                also = f", or {_INT8} with scales" if len(entry.shape) > 1 else ""
                raise CheckpointError(
                    f"{entry.file}: {leaf.name} is of type {entry.dtype}; "
                    f"expected one of {', '.join(_DTYPES)}{also}."
                )

    def _verify_scale(self, name: str, matrix: _HeaderEntry) -> None:
        scale = self._entries.get(f"{name}_scale")
        if scale is None or scale.dtype not in _DTYPES or scale.shape != matrix.shape[:1]:
            found = f"{scale.dtype} {list(scale.shape)}" if scale else "nothing"
            raise CheckpointError(
                f"{matrix.file}: {name} is of type {_INT8}, so {name}_scale must have "
                f"{list(matrix.shape[:1])} numbers of {', '.join(_DTYPES)}; found {found}."
            )

    def load(self, tree: T, device: torch.device, dtype: torch.dtype) -> T:
        """Verifies a tree of specs, then loads its tensors.

        Args:
            tree: Dataclasses with `TensorSpec` leaves.
            device: Of the tensors.
            dtype: Of the tensors.

        Returns:
            The same tree with tensors as leaves.

        Raises:
            CheckpointError: See `verify`; or a file changed after its header was read.
        """
        self.verify(tree)
        files = {entry.file for entry in self._entries.values()}
        try:
            handles = {file: safe_open(str(file), framework="pt") for file in files}

            def stored(name: str) -> Tensor:
                return handles[self._entries[name].file].get_tensor(name)

            def read(leaf: TensorSpec) -> Tensor:
                tensor = stored(leaf.name)
                if self._entries[leaf.name].dtype == _INT8:
                    scale = stored(f"{leaf.name}_scale").float()
                    tensor = (tensor.flatten(1) * scale[:, None]).view(leaf.shape)
                return tensor.to(device=device, dtype=dtype)

            return map_leaves(tree, read)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.folder}: reading the tensors failed ({error})."
            ) from error


def _read_header(file: Path) -> dict[str, _HeaderEntry]:
    """Reads dtypes and shapes and checks the extents, without mapping the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file}: truncated, or not a safetensors file ({size} bytes)."
                )
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise TypeError("the header is not an object")
        header.pop("__metadata__", None)
        entries: dict[str, _HeaderEntry] = {}
        for name, info in header.items():
            begin, end = info["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise CheckpointError(
                    f"{file}: truncated; {name} ends at byte {8 + length + end} of {size}."
                )
            shape = tuple(info["shape"])
            if len(shape) > 8 or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
                raise CheckpointError(f"{file}: {name} has an invalid shape.")
            item_bytes = {"BF16": 2, "F16": 2, "F32": 4, _INT8: 1}.get(info["dtype"])
            if item_bytes is not None and math.prod(shape) * item_bytes != end - begin:
                raise CheckpointError(
                    f"{file}: {name} of shape {list(shape)} has {end - begin} bytes."
                )
            entries[name] = _HeaderEntry(file, str(info["dtype"]), shape)
        return entries
    except (OSError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as safetensors ({error!r}).") from error
