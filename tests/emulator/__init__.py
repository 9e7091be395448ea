"""The kernel's operators on a host without a GPU: csrc compiled with emulated instructions."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_ubyte, c_uint64, c_void_p
from typing import Any

from torch import Tensor

from tests.emulator.build import load_library

COLUMNS, WIDE = 8, 16
STREAM = 132  # bytes

_WORDS = ("qkv", "partial", "statistic", "attended", "out", "middle", "down", "logits")
_REMEMBERED = 200  # positions of a layer, so that some stay in a cache and others do not
_COMMON = ("projected", "drawn", "broken", "given_up")


class _Network(ctypes.Structure):
    _fields_ = (
        ("weights", c_void_p), ("layers", c_void_p), ("num_layers", c_int), ("norm", c_void_p),
        ("keys", c_void_p), ("values", c_void_p), ("slots", c_int), ("positions", c_int),
        ("turns", c_void_p), ("eps", c_float), *((name, c_void_p) for name in _WORDS),
    )  # fmt: skip


class _Watch(ctypes.Structure):
    _fields_ = (("count", c_int), ("heads", c_int * 8), ("scores", c_void_p))


class _Params(ctypes.Structure):
    _fields_ = (
        ("talker", _Network), ("predictor", _Network),
        *((name, c_void_p) for name in (
            "talker_head", "predictor_heads", "project_bias", "code_embedding")),
        ("group_embeddings", c_void_p * 15),
        *((name, c_void_p) for name in ("pad", "text", "prompt")),
        ("passes", c_void_p), ("num_passes", c_int),
        ("hidden", c_void_p), ("seen", c_void_p), ("eos", c_int),
        ("remembered", c_int), ("watch", _Watch),
        ("streams", c_ubyte * (COLUMNS * STREAM)), ("columns", c_int), ("max_frames", c_int),
        *((name, c_void_p) for name in ("frames", "published", "stop", "failure")),
        ("patience", c_uint64), *((name, c_void_p) for name in (*_COMMON, "times")),
    )  # fmt: skip


class EmulatedOps:
    """What `torch.ops.megakernel_tts` is on a GPU, for a model as in csrc/shapes.cuh.

    Attributes:
        late: Turns of the other blocks after which block 0 begins.
    """

    def __init__(self, model: str, blocks: int = 3, *options: str) -> None:
        """Compiles the kernel.

        Args:
            model: Its name in csrc/shapes.cuh, or a type of that kind.
            blocks: Of the emulated grid.
            options: For the compiler, beside those of every emulator.
        """
        self._blocks, self.late = blocks, 0
        options = f"-DMEGAKERNEL_MODEL={model}", *options
        self._library = load_library("emulate.cc", *options)
        assert self._library.params_bytes() == ctypes.sizeof(_Params)

    def models(self) -> int:
        return 1

    def shape(self, _: int) -> list[int]:
        return [self._library.shape(i) for i in range(14)]

    def workspace_words(self, _: int) -> int:
        return self._library.workspace_words()

    def logits_at(self, _: int) -> list[int]:
        return [self._library.logits_at(network) for network in range(2)]

    def blocks(self, _: int) -> int:
        return self._blocks

    def prefill(self, *arguments: Any) -> None:
        *lists, prompt, passes = arguments
        params = self._params(*lists)
        params.prompt = prompt.data_ptr()
        params.passes, params.num_passes = passes.data_ptr(), len(passes)
        self._library.emulate_prefill(ctypes.byref(params), self._blocks, self.late)

    def generate(self, *arguments: Any) -> None:
        *lists, streams, max_frames, watched = arguments
        params = self._params(*lists)
        params.streams[: streams.numel()] = streams.flatten().tolist()
        params.columns, params.max_frames = len(streams), max_frames
        params.watch = _Watch(len(watched), (c_int * 8)(*watched), lists[2][8].data_ptr())
        self._library.emulate_generate(ctypes.byref(params), self._blocks, self.late)

    def divided(self, numbers: Tensor, divisor: float) -> Tensor:
        """Float32 numbers by a divisor, as the draws divide scores by a temperature."""
        quotients = numbers.clone()
        self._library.divide(c_void_p(quotients.data_ptr()), len(numbers), c_float(divisor))
        return quotients

    def _params(
        self,
        _: int,
        weights: Sequence[Tensor],
        memory: Sequence[Tensor],
        mailbox: Sequence[Tensor],
        eos: int,
        eps: float,
        patience: int,
    ) -> _Params:
        """As csrc/ops.cpp fills them."""
        w, m = [t.data_ptr() for t in weights], [t.data_ptr() for t in memory]
        params = _Params(
            talker=_network(w[0], w[2], w[4], m[0], m[1], w[11], memory[0], eps),
            predictor=_network(w[1], w[3], w[5], m[2], m[3], w[11], memory[2], eps),
            talker_head=w[6], predictor_heads=w[7], code_embedding=w[8],
            group_embeddings=(c_void_p * 15)(*weights[9].tolist()),
            pad=w[10], project_bias=w[12], text=m[4], hidden=m[5], seen=m[6],
            eos=eos, remembered=_REMEMBERED, patience=patience,
            **dict(zip(("frames", "published", "stop", "failure"),
                       (t.data_ptr() for t in mailbox), strict=True)),
        )  # fmt: skip
        self._library.lay_out(ctypes.byref(params), c_void_p(m[7]))
        return params


def _network(
    stack: int, layers: int, norm: int, keys: int, values: int, turns: int, cache: Tensor,
    eps: float,
) -> _Network:  # fmt: skip
    count, slots, _, positions, _ = cache.shape
    return _Network(stack, layers, count, norm, keys, values, slots, positions, turns, eps)
