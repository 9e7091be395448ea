"""Structs that cross from Python to the decode kernels, with the C++ names and types.

`codec_structs` and `align_structs` declare those of the other kernels in the same way.

A build appends `layout_checks` to its source, so it fails if a field of csrc has another name,
type or offset than the field here, or an enumerator another value. csrc/params.cuh,
csrc/workspace.cuh and csrc/decode/kernels.cuh explain the fields.
"""

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int, c_uint, c_uint64
from enum import IntEnum
from functools import cache
from itertools import chain
from typing import Any, ClassVar

BUFFER_COLUMNS = 8  # columns of an exchange buffer, and the size of `Params.streams`
BATCH_COLUMNS = 16  # columns of a prefill batch
NUM_CODE_GROUPS = 16  # codes of a frame
MAX_CAPTURED_HEADS = 8

_SCALARS: dict[type[Any], str] = {
    ctypes.c_bool: "bool",
    ctypes.c_float: "float",
    ctypes.c_int: "int",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint: "unsigned",
    ctypes.c_uint64: "uint64_t",
}


EXCHANGE_BUFFERS = (
    "qkv",
    "attention_partials",
    "softmax_stats",
    "attention_output",
    "attention_residual",
    "mlp_hidden",
    "mlp_residual",
    "logits",
)

# NVRTC has no `offsetof`, and takes the address of a field at 0 as a constant.
_CHECK_DEFINITIONS = """
template <class, class> constexpr bool megakernel_is_same = false;
template <class T> constexpr bool megakernel_is_same<T, T> = true;
#ifdef __CUDACC_RTC__
#define MEGAKERNEL_OFFSET(type, field) ((unsigned long)__INTADDR__(&((type*)0)->field))
#else
#define MEGAKERNEL_OFFSET(type, field) __builtin_offsetof(type, field)
#endif
"""


class DeviceStruct(ctypes.Structure):
    """A struct of csrc. Assigning to a name that is no field raises `AttributeError`.

    Attributes:
        CPP_NAME: Qualified name in C++.
    """

    __slots__ = ()
    CPP_NAME: ClassVar[str]


class DeviceEnum(IntEnum):
    """An enumeration of csrc: the member `GATE_UP` is `megakernel::kGateUp` there."""

    @property
    def cpp_name(self) -> str:
        """Qualified name of the enumerator in C++."""
        return f"megakernel::k{self.name.title().replace('_', '')}"


class EndReason(DeviceEnum):
    """Why a stream ended with a frame; `RUNNING`: it did not."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    STOPPED = 3
    NON_FINITE = 4


class Phase(DeviceEnum):
    """The phases of the decode kernels."""

    QKV = 0
    ATTENTION = 1
    ATTENTION_COMBINE = 2
    OUT = 3
    GATE_UP = 4
    DOWN = 5
    HEAD = 6
    SAMPLE = 7
    INPUT_PROJECTION = 8
    NUM_PHASES = 9


class _Pointer(ctypes.c_void_p):
    CPP_NAME: ClassVar[str]


class _Enum(c_int):
    CPP_NAME: ClassVar[str]


@cache
def pointer(pointee: str) -> type[ctypes.c_void_p]:
    """The type of a field that holds an address.

    Args:
        pointee: The C++ type it points to, such as `const float`.
    """
    return type(f"Pointer to {pointee}", (_Pointer,), {"CPP_NAME": f"{pointee}*"})


@cache
def enum(name: str) -> type[c_int]:
    """The type of a field that holds a C++ enumerator with `int` as its type.

    Args:
        name: Qualified name in C++.
    """
    return type(name, (_Enum,), {"CPP_NAME": name})


class ExchangeBuffers(DeviceStruct):
    """Addresses of a network's part of the workspace."""

    __slots__ = ()
    CPP_NAME = "megakernel::ExchangeBuffers"
    _fields_ = tuple((name, pointer("uint32_t")) for name in EXCHANGE_BUFFERS)


class Network(DeviceStruct):
    """A decoder stack and its KV cache."""

    __slots__ = ()
    CPP_NAME = "megakernel::Network"
    _fields_ = (
        ("weights", pointer("const uint4")),
        ("layer_norms", pointer("const megakernel::bf16")),
        ("num_layers", c_int),
        ("final_norm", pointer("const megakernel::bf16")),
        ("keys", pointer("megakernel::bf16")),
        ("values", pointer("megakernel::bf16")),
        ("num_slots", c_int),
        ("num_positions", c_int),
        ("rope_table", pointer("const float2")),
        ("eps", c_float),
        ("exchange", ExchangeBuffers),
    )


class SamplingParams(DeviceStruct):
    """How the codes of one network are sampled."""

    __slots__ = ()
    CPP_NAME = "megakernel::SamplingParams"
    _fields_ = (("temperature", c_float), ("top_k", c_int), ("top_p", c_float))


class Stream(DeviceStruct):
    """A stream's state at the beginning of a launch."""

    __slots__ = ()
    CPP_NAME = "megakernel::Stream"
    _fields_ = (
        ("slot", c_int),
        ("prompt_length", c_int),
        ("num_frames", c_int),
        ("max_frames", c_int),
        ("num_text_vectors", c_int),
        ("text_complete", c_int),
        ("starts_from_prompt", c_int),
        ("codes", c_int * NUM_CODE_GROUPS),
        ("noise_frame_offset", c_uint),
        ("seed", c_uint * 2),
        ("repetition_penalty", c_float),
        ("talker", SamplingParams),
        ("predictor", SamplingParams),
    )


class PrefillColumn(DeviceStruct):
    """One position of a prompt, in one column of a prefill batch."""

    __slots__ = ()
    CPP_NAME = "megakernel::PrefillColumn"
    _fields_ = (("slot", c_int), ("position", c_int), ("first_column", c_int))


class PrefillBatch(DeviceStruct):
    """Prompt positions that pass through the talker together."""

    __slots__ = ()
    CPP_NAME = "megakernel::PrefillBatch"
    _fields_ = (
        ("num_columns", c_int),
        ("first_row", c_int),
        ("prompt_end_mask", c_int),
        ("columns", PrefillColumn * BATCH_COLUMNS),
    )


class AttentionCapture(DeviceStruct):
    """The talker's attention heads whose scores a launch copies out."""

    __slots__ = ()
    CPP_NAME = "megakernel::AttentionCapture"
    _fields_ = (
        ("num_heads", c_int),
        ("heads", c_int * MAX_CAPTURED_HEADS),
        ("scores", pointer("float")),
    )


class PublishedFrame(DeviceStruct):
    """A frame in the memory that the host reads."""

    __slots__ = ()
    CPP_NAME = "megakernel::PublishedFrame"
    _fields_ = (("end_reason", c_int), ("codes", c_int * NUM_CODE_GROUPS))


class Params(DeviceStruct):
    """The argument of the decode kernels."""

    __slots__ = ()
    CPP_NAME = "megakernel::Params"
    _fields_ = (
        ("talker", Network),
        ("predictor", Network),
        ("talker_head", pointer("const uint4")),
        ("predictor_heads", pointer("const uint4")),
        ("input_projection_bias", pointer("const megakernel::bf16")),
        ("code_embedding", pointer("const megakernel::bf16")),
        ("group_embeddings", pointer("const megakernel::bf16") * (NUM_CODE_GROUPS - 1)),
        ("pad_vector", pointer("const megakernel::bf16")),
        ("text_vectors", pointer("const megakernel::bf16")),
        ("prompt_vectors", pointer("const megakernel::bf16")),
        ("prefill_batches", pointer("const megakernel::PrefillBatch")),
        ("num_prefill_batches", c_int),
        ("prompt_hidden", pointer("float")),
        ("seen_codes", pointer("uint8_t")),
        ("eos_id", c_int),
        ("l2_resident_positions", c_int),
        ("attention_capture", AttentionCapture),
        ("streams", Stream * BUFFER_COLUMNS),
        ("num_streams", c_int),
        ("max_frames", c_int),
        ("published_frames", pointer("megakernel::PublishedFrame")),
        ("num_published", pointer("unsigned")),
        ("stop_flags", pointer("const unsigned")),
        ("failure", pointer("unsigned")),
        ("timeout_ns", c_uint64),
        ("predictor_input", pointer("uint32_t")),
        ("sampled_codes", pointer("uint32_t")),
        ("non_finite", pointer("uint32_t")),
        ("abort_flag", pointer("uint32_t")),
        ("phase_times", pointer("uint64_t")),
    )


class ExchangeOffsets(DeviceStruct):
    """Where the buffers of `ExchangeBuffers` begin in the workspace, in values of 32 bits."""

    __slots__ = ()
    CPP_NAME = "megakernel::ExchangeOffsets"
    _fields_ = tuple((name, ctypes.c_int64) for name in EXCHANGE_BUFFERS)


class WorkspaceOffsets(DeviceStruct):
    """The layout of the workspace, in values of 32 bits; the names are those of `Params`."""

    __slots__ = ()
    CPP_NAME = "megakernel::WorkspaceOffsets"
    _fields_ = (
        ("talker", ExchangeOffsets),
        ("predictor", ExchangeOffsets),
        ("predictor_input", ctypes.c_int64),
        ("sampled_codes", ctypes.c_int64),
        ("non_finite", ctypes.c_int64),
        ("abort_flag", ctypes.c_int64),
        ("num_values", ctypes.c_int64),
    )


class DecodeInfo(DeviceStruct):
    """Facts about a build of the decode kernels that the host reads from the module."""

    __slots__ = ()
    CPP_NAME = "megakernel::DecodeInfo"
    _fields_ = (
        ("max_streams", c_int),
        ("max_prefill_columns", c_int),
        ("narrow_prefill_columns", c_int),
        ("page_size", c_int),
        ("span_size", c_int),
        ("kv_width", c_int),
        ("num_threads", c_int),
        ("max_blocks", c_int),
        ("max_residual_rows", c_int),
        ("stage_steps", c_int),
        ("max_row_groups", c_int),
        ("shared_bytes_one_column", c_int),
        ("shared_bytes_streams", c_int),
        ("shared_bytes_wide", c_int),
        ("workspace", WorkspaceOffsets),
    )


SharedType = type[DeviceStruct] | type[DeviceEnum]

DECODE_TYPES: tuple[SharedType, ...] = (
    EndReason,
    Phase,
    ExchangeBuffers,
    Network,
    SamplingParams,
    Stream,
    PrefillColumn,
    PrefillBatch,
    AttentionCapture,
    PublishedFrame,
    Params,
    ExchangeOffsets,
    WorkspaceOffsets,
    DecodeInfo,
)


def _cpp_type(kind: type[Any]) -> str:
    """The C++ spelling of a field's type."""
    if issubclass(kind, ctypes.Array):
        element: Any = kind._type_
        return f"{_cpp_type(element)}[{kind._length_}]"
    return _SCALARS[kind] if kind in _SCALARS else kind.CPP_NAME


def _enum_checks(enumeration: type[DeviceEnum]) -> Iterator[str]:
    for member in enumeration:
        yield (
            f"static_assert({member.cpp_name} == {member.value}, "
            f'"{enumeration.__name__}.{member.name} has another value than in kernels/structs.py");'
        )


def _struct_checks(struct: type[DeviceStruct]) -> Iterator[str]:
    cpp, name = struct.CPP_NAME, struct.__name__
    for field, kind, *_ in struct._fields_:
        offset = getattr(struct, field).offset
        yield (
            f"static_assert(megakernel_is_same<decltype({cpp}::{field}), {_cpp_type(kind)}>, "
            f'"{name}.{field} has another type than in kernels/structs.py");'
        )
        yield (
            f"static_assert(MEGAKERNEL_OFFSET({cpp}, {field}) == {offset}, "
            f'"{name}.{field} has another offset than the {offset} of kernels/structs.py");'
        )
    size = ctypes.sizeof(struct)
    yield (
        f"static_assert(sizeof({cpp}) == {size}, "
        f'"{name} has another size than the {size} bytes of kernels/structs.py");'
    )


def layout_checks(types: Sequence[SharedType]) -> str:
    """C++ text that compiles only if csrc declares the types as this module does.

    Args:
        types: The types to check. The text goes behind the headers that declare them.
    """
    checks = (
        _enum_checks(shared) if issubclass(shared, DeviceEnum) else _struct_checks(shared)
        for shared in types
    )
    return "\n".join([_CHECK_DEFINITIONS, *chain.from_iterable(checks), ""])
