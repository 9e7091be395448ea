"""The kernel's operators on a host without a GPU: csrc compiled with emulated instructions."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import c_float, c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from torch import Tensor

ROOT = Path(__file__).parent.parent.parent
SPLITS, COLUMNS, SPANS, HEAD, CONTROL = 2, 8, 16, 128, 1024


class _Network(ctypes.Structure):
    _fields_ = (
        ("layers", c_void_p), ("num_layers", c_int), ("norm", c_void_p), ("keys", c_void_p),
        ("values", c_void_p), ("slots", c_int), ("positions", c_int), ("turns", c_void_p),
        ("eps", c_float),
    )  # fmt: skip


class _Params(ctypes.Structure):
    _fields_ = (
        ("talker", _Network), ("predictor", _Network),
        *((name, c_void_p) for name in (
            "talker_head", "predictor_heads", "project", "project_bias", "code_embedding",
            "group_embeddings", "pad", "text", "prompt")),
        ("prompt_length", c_int), ("hidden", c_void_p), ("seen", c_void_p), ("eos", c_int),
        ("streams", c_void_p), ("columns", c_int), ("out_splits", c_int), ("down_splits", c_int),
        ("max_frames", c_int),
        *((name, c_void_p) for name in (
            "frames", "published", "stop", "qkv", "attended", "weight", "partial", "middle",
            "logits", "drawn", "barrier", "epoch", "given_up")),
        ("patience", c_uint64), ("failure", c_void_p),
    )  # fmt: skip


class EmulatedOps:
    """What `torch.ops.megakernel_tts` is on a GPU, for one of the models in csrc/shapes.cuh."""

    def __init__(self, model: str, folder: Path, blocks: int = 3) -> None:
        """Compiles the kernel.

        Args:
            model: Its name in csrc/shapes.cuh.
            folder: Where the library goes.
            blocks: Of the emulated grid.
        """
        compiler = shutil.which("g++")
        assert compiler is not None, "the emulator needs g++"
        library = folder / f"{model}.so"
        if not library.exists():
            command = [compiler, "-O2", "-std=c++20", "-fPIC", "-shared"]
            command += [f"-DMEGAKERNEL_MODEL={model}", f"-I{ROOT / 'tests/emulator'}"]
            source = ROOT / "tests" / "emulator" / "emulate.cc"
            subprocess.run([*command, "-o", str(library), str(source)], check=True)
        self.blocks = blocks
        self._library = ctypes.CDLL(str(library))
        assert self._library.params_bytes() == ctypes.sizeof(_Params)

    def models(self) -> int:
        return 1

    def shape(self, _: int) -> list[int]:
        return [self._library.shape(i) for i in range(9)]

    def workspace_floats(self, _: int) -> int:
        return COLUMNS * self._library.workspace_floats()

    def prefill(self, *arguments: Any) -> None:
        *lists, prompt = arguments
        params = self._params(*lists)
        params.prompt, params.prompt_length = prompt.data_ptr(), len(prompt)
        self._library.emulate_prefill(ctypes.byref(params), self.blocks)

    def generate(self, *arguments: Any) -> None:
        *lists, max_frames = arguments
        params = self._params(*lists)
        params.max_frames = max_frames
        self._library.emulate_generate(ctypes.byref(params), self.blocks)

    def _params(
        self,
        _: int,
        weights: Sequence[Tensor],
        memory: Sequence[Tensor],
        mailbox: Sequence[Tensor],
        eos: int,
        eps: float,
    ) -> _Params:
        """As csrc/ops.cpp fills them."""
        w, m = [t.data_ptr() for t in weights], [t.data_ptr() for t in memory]
        hidden, heads, kv_heads, middle = (
            max(self.shape(0)[i], self.shape(0)[4 + i]) for i in range(4)
        )
        floats = {
            "qkv": (heads + 2 * kv_heads) * HEAD,
            "attended": SPANS * heads * HEAD,
            "weight": SPANS * heads * 2,
            "partial": SPLITS * hidden,
            "middle": middle,
            "logits": self.shape(0)[8] + CONTROL,
            "drawn": 1,
        }
        assert sum(floats.values()) <= memory[8].numel() / COLUMNS
        places, at = dict[str, int](), m[8]
        for name, count in floats.items():
            places[name] = at
            at += 4 * COLUMNS * count
        return _Params(
            talker=_network(w[0], w[2], m[0], m[1], w[9], memory[0], eps),
            predictor=_network(w[1], w[3], m[2], m[3], w[9], memory[2], eps),
            talker_head=w[4], predictor_heads=w[5], code_embedding=w[6], group_embeddings=w[7],
            pad=w[8], project=w[10], project_bias=w[11], text=m[4], hidden=m[5], seen=m[6],
            streams=m[7], columns=len(memory[7]), barrier=m[9], epoch=m[9] + 128,
            given_up=m[9] + 256, eos=eos, out_splits=SPLITS, down_splits=SPLITS,
            **dict(zip(("frames", "published", "stop", "failure"),
                       (t.data_ptr() for t in mailbox), strict=True)),
            **places,
        )  # fmt: skip


def _network(
    layers: int, norm: int, keys: int, values: int, turns: int, cache: Tensor, eps: float
) -> _Network:
    count, slots, _, positions, _ = cache.shape
    return _Network(layers, count, norm, keys, values, slots, positions, turns, eps)
