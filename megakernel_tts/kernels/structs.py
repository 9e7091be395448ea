"""What Python and the decode kernels share: structs, enumerations and constants, with C++ names.

`codec_structs` and `align_structs` declare those of the other kernels in the same way.

A build appends `declaration_checks` to its source. It fails if a field of csrc has another name,
type or offset than the field here, or if an enumerator or a constant has another value.
csrc/params.cuh, csrc/workspace.cuh and csrc/decode/kernels.cuh explain the fields.
"""

import ctypes
from ctypes import c_float, c_int, c_uint, c_uint64

from megakernel_common.kernels.declarations import (
    Declaration,
    DeviceConstant,
    DeviceEnum,
    DeviceStruct,
    pointer,
)

ARGUMENT_STREAMS = 8  # streams that `Params` holds
BATCH_COLUMNS = 16  # columns of a prefill batch
WIDE_BATCH_COLUMNS = 64  # columns of a wide kernel's prefill batch
NUM_CODE_GROUPS = 16  # codes of a frame
MAX_CAPTURED_HEADS = 8
MIN_FRAMES = 2  # frames before which the released model does not sample the end of speech
HEAD_DIM = 128  # channels of a head
ROW_GROUP_SIZE = 8  # rows of a row group
STEP_K = 256  # elements of K that a thread block multiplies per step

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

WIDE_BUFFERS = ("attention_normed", "mlp_normed", "attention_scales", "mlp_scales", "cache_tags")


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


class PhaseInterval(DeviceEnum):
    """The intervals of a phase whose cycles the profiling build counts."""

    WAIT = 0
    MULTIPLY = 1
    REST = 2
    NUM_PHASE_INTERVALS = 3


class ExchangeBuffers(DeviceStruct):
    """Addresses of a network's part of the workspace."""

    __slots__ = ()
    CPP_NAME = "megakernel::ExchangeBuffers"
    _fields_ = tuple((name, pointer("uint32_t")) for name in EXCHANGE_BUFFERS)


class WideBuffers(DeviceStruct):
    """Addresses of the buffers that only wide kernels use."""

    __slots__ = ()
    CPP_NAME = "megakernel::WideBuffers"
    _fields_ = tuple((name, pointer("uint32_t")) for name in WIDE_BUFFERS)


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
        ("page_table", pointer("const int")),
        ("num_slots", c_int),
        ("num_positions", c_int),
        ("rope_table", pointer("const float2")),
        ("eps", c_float),
        ("exchange", ExchangeBuffers),
    )


class NetworkSampling(DeviceStruct):
    """How the codes of one network are sampled."""

    __slots__ = ()
    CPP_NAME = "megakernel::NetworkSampling"
    _fields_ = (("temperature", c_float), ("top_k", c_int), ("top_p", c_float))


class StreamParams(DeviceStruct):
    """A stream's state at the beginning of a launch."""

    __slots__ = ()
    CPP_NAME = "megakernel::StreamParams"
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
        ("talker", NetworkSampling),
        ("predictor", NetworkSampling),
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


class WidePrefillColumn(DeviceStruct):
    """One position of a prompt, in one column of a wide kernel's prefill batch."""

    __slots__ = ()
    CPP_NAME = "megakernel::WidePrefillColumn"
    _fields_ = (
        ("slot", c_int),
        ("position", c_int),
        ("first_column", c_int),
        ("precedes_tile", c_int),
        ("ends_prompt", c_int),
    )


class WidePrefillBatch(DeviceStruct):
    """Prompt positions that pass through the talker together in a wide kernel."""

    __slots__ = ()
    CPP_NAME = "megakernel::WidePrefillBatch"
    _fields_ = (
        ("num_columns", c_int),
        ("first_row", c_int),
        ("columns", WidePrefillColumn * WIDE_BATCH_COLUMNS),
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
        ("streams", StreamParams * ARGUMENT_STREAMS),
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
        ("wide_talker", WideBuffers),
        ("wide_predictor", WideBuffers),
        ("wide_streams", pointer("const megakernel::StreamParams")),
        ("wide_prefill_batch", pointer("const megakernel::WidePrefillBatch")),
    )


class ExchangeOffsets(DeviceStruct):
    """Where the buffers of `ExchangeBuffers` begin in the workspace, in values of 32 bits."""

    __slots__ = ()
    CPP_NAME = "megakernel::ExchangeOffsets"
    _fields_ = tuple((name, ctypes.c_int64) for name in EXCHANGE_BUFFERS)


class WideOffsets(DeviceStruct):
    """Where the buffers of `WideBuffers` begin in the workspace, in values of 32 bits."""

    __slots__ = ()
    CPP_NAME = "megakernel::WideOffsets"
    _fields_ = tuple((name, ctypes.c_int64) for name in WIDE_BUFFERS)


class WorkspaceOffsets(DeviceStruct):
    """The layout of the workspace, in values of 32 bits; the names are those of `Params`."""

    __slots__ = ()
    CPP_NAME = "megakernel::WorkspaceOffsets"
    _fields_ = (
        ("talker", ExchangeOffsets),
        ("predictor", ExchangeOffsets),
        ("wide_talker", WideOffsets),
        ("wide_predictor", WideOffsets),
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
        ("small_prefill_columns", c_int),
        ("kv_tile_size", c_int),
        ("span_size", c_int),
        ("page_size", c_int),
        ("max_pages", c_int),
        ("kv_width", c_int),
        ("num_threads", c_int),
        ("max_blocks", c_int),
        ("max_residual_rows", c_int),
        ("stage_steps", c_int),
        ("max_row_groups", c_int),
        ("shared_bytes_one_column", c_int),
        ("shared_bytes_streams", c_int),
        ("shared_bytes_large_prefill", c_int),
        ("workspace", WorkspaceOffsets),
    )


DECODE_DECLARATIONS: tuple[Declaration, ...] = (
    DeviceConstant("megakernel::kMinFrames", MIN_FRAMES),
    DeviceConstant("megakernel::kHeadDim", HEAD_DIM),
    DeviceConstant("megakernel::kRowGroupSize", ROW_GROUP_SIZE),
    DeviceConstant("megakernel::kStepK", STEP_K),
    EndReason,
    Phase,
    PhaseInterval,
    ExchangeBuffers,
    WideBuffers,
    Network,
    NetworkSampling,
    StreamParams,
    PrefillColumn,
    PrefillBatch,
    WidePrefillColumn,
    WidePrefillBatch,
    AttentionCapture,
    PublishedFrame,
    Params,
    ExchangeOffsets,
    WideOffsets,
    WorkspaceOffsets,
    DecodeInfo,
)
