"""The kernel's operators on a host without a GPU: csrc compiled with emulated instructions."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_ubyte, c_uint64, c_void_p
from typing import Any

from torch import Tensor

from tests.emulator.build import load_library

COLUMNS, WIDE = 8, 16
STREAM = 132  # bytes

_EXCHANGE = (
    "qkv", "attention_partials", "softmax_stats", "attention_output", "attention_residual",
    "mlp_hidden", "mlp_residual", "logits",
)  # fmt: skip
_L2_RESIDENT_POSITIONS = 200  # some positions of the tests are L2-resident, others are not
_COMMON = ("predictor_input", "sampled_codes", "non_finite", "abort_flag")
_HOST_BUFFERS = ("published_frames", "num_published", "stop_flags", "failure")


class _Network(ctypes.Structure):
    _fields_ = (
        ("weights", c_void_p), ("layer_norms", c_void_p), ("num_layers", c_int),
        ("final_norm", c_void_p), ("keys", c_void_p), ("values", c_void_p),
        ("num_slots", c_int), ("num_positions", c_int),
        ("rope_table", c_void_p), ("eps", c_float), *((name, c_void_p) for name in _EXCHANGE),
    )  # fmt: skip


class _AttentionCapture(ctypes.Structure):
    _fields_ = (("num_heads", c_int), ("heads", c_int * 8), ("scores", c_void_p))


class _Params(ctypes.Structure):
    _fields_ = (
        ("talker", _Network), ("predictor", _Network),
        *((name, c_void_p) for name in (
            "talker_head", "predictor_heads", "input_projection_bias", "code_embedding")),
        ("group_embeddings", c_void_p * 15),
        *((name, c_void_p) for name in ("pad_vector", "text_vectors", "prompt_vectors")),
        ("prefill_batches", c_void_p), ("num_prefill_batches", c_int),
        ("prompt_hidden", c_void_p), ("seen_codes", c_void_p), ("eos_id", c_int),
        ("l2_resident_positions", c_int), ("attention_capture", _AttentionCapture),
        ("streams", c_ubyte * (COLUMNS * STREAM)), ("num_streams", c_int), ("max_frames", c_int),
        *((name, c_void_p) for name in _HOST_BUFFERS), ("timeout_ns", c_uint64),
        *((name, c_void_p) for name in (*_COMMON, "phase_times")),
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
        params.prompt_vectors = prompt.data_ptr()
        params.prefill_batches, params.num_prefill_batches = passes.data_ptr(), len(passes)
        self._library.emulate_prefill(ctypes.byref(params), self._blocks, self.late)

    def generate(self, *arguments: Any) -> None:
        *lists, streams, max_frames, watched = arguments
        params = self._params(*lists)
        params.streams[: streams.numel()] = streams.flatten().tolist()
        params.num_streams, params.max_frames = len(streams), max_frames
        params.attention_capture = _AttentionCapture(
            len(watched), (c_int * 8)(*watched), lists[2][8].data_ptr()
        )
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
            pad_vector=w[10], input_projection_bias=w[12], text_vectors=m[4], prompt_hidden=m[5],
            seen_codes=m[6],
            eos_id=eos, l2_resident_positions=_L2_RESIDENT_POSITIONS, timeout_ns=patience,
            **dict(zip(_HOST_BUFFERS, (t.data_ptr() for t in mailbox), strict=True)),
        )  # fmt: skip
        self._library.lay_out(ctypes.byref(params), c_void_p(m[7]))
        return params


def _network(
    stack: int, layers: int, norm: int, keys: int, values: int, turns: int, cache: Tensor,
    eps: float,
) -> _Network:  # fmt: skip
    count, slots, _, positions, _ = cache.shape
    return _Network(stack, layers, count, norm, keys, values, slots, positions, turns, eps)
