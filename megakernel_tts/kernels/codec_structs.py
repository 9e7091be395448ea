"""What Python and the codec's kernels share; csrc/codec/params.cuh explains the fields."""

from ctypes import c_float, c_int, c_int64
from enum import nonmember

from megakernel_common.kernels.declarations import (
    Declaration,
    DeviceConstant,
    DeviceEnum,
    DeviceStruct,
    enum,
    pointer,
)

NUM_CODEBOOKS = 16  # codes of a frame
MAX_HISTORIES = 32
ATTENTION_WINDOW = 72  # frames, the current one included
STEP_CHANNELS = 32  # channels of a step of K
MAX_DEPTHWISE_CHANNELS = 1024
BLOCK_THREADS = 256
SAMPLE_THREADS = 128
SAMPLE_ROWS = 16  # that lanes compute together; a frame has a multiple of them
SAMPLE_BLOCK_ROWS = 128
SAMPLE_TAPS = 7
ATTENTION_WARPS = 4
# Of csrc/codec/warpgroup_tile.cuh.
WARPGROUP_THREADS = 128
WARPGROUP_ROWS = 64


class Epilogue(DeviceEnum):
    """The function that a projection applies to its sums."""

    CPP_NAMESPACE = nonmember("megakernel::codec")
    LINEAR = 0
    SNAKE = 1
    GELU = 2
    SILU_GATE = 3
    ROPE_QKV = 4


class Frame(DeviceStruct):
    """One frame of a call; written by the host."""

    __slots__ = ()
    CPP_NAME = "megakernel::codec::Frame"
    _fields_ = (
        ("pending_address", pointer("const int")),
        ("slot", c_int),
        ("first_frame", c_int),
        ("position", c_int),
        ("codes", c_int * NUM_CODEBOOKS),
    )


class Activations(DeviceStruct):
    """Activations and their history."""

    __slots__ = ()
    CPP_NAME = "megakernel::codec::Activations"
    _fields_ = (
        ("data", pointer("megakernel::f16")),
        ("history", pointer("megakernel::f16")),
        ("history_stride", c_int64),
        ("num_planes", c_int),
        ("num_channels", c_int),
        ("history_rows", c_int),
        ("rows_per_frame", c_int),
        ("is_tiled", c_int),
    )


class ProjectionParams(DeviceStruct):
    """The argument of the projection kernels: a convolution or linear layer."""

    __slots__ = ()
    CPP_NAME = "megakernel::codec::ProjectionParams"
    _fields_ = (
        ("frames", pointer("const megakernel::codec::Frame")),
        ("num_rows", c_int),
        ("input", Activations),
        ("num_taps", c_int),
        ("dilation", c_int),
        ("weights", pointer("const uint4")),
        ("column_params", pointer("const megakernel::codec::ColumnParams")),
        ("warpgroup_weights", pointer("const uint4")),
        ("warpgroup_column_params", pointer("const megakernel::codec::ColumnParams")),
        ("warpgroup_columns", c_int),
        ("num_columns", c_int),
        ("num_k_splits", c_int),
        ("norm_channels", c_int),
        ("eps", c_float),
        ("residual", pointer("const float")),
        ("residual_out", pointer("float")),
        ("epilogue", enum("megakernel::codec::Epilogue")),
        ("output", Activations),
        ("rope", pointer("const float2")),
        ("queries", pointer("float")),
        ("kv_cache", pointer("megakernel::f16")),
        ("kv_slot_stride", c_int64),
        ("kv_ring_size", c_int),
        ("head_dim", c_int),
    )


class ResidualUnitParams(DeviceStruct):
    """The argument of the kernels of residual units."""

    __slots__ = ()
    CPP_NAME = "megakernel::codec::ResidualUnitParams"
    _fields_ = (
        ("convolution", ProjectionParams),
        ("pointwise", ProjectionParams),
        ("pointwise_weights", pointer("const uint4")),
        ("is_reversed", c_int),
    )


class EmbedParams(DeviceStruct):
    """The argument of the embedding kernel."""

    __slots__ = ()
    CPP_NAME = "megakernel::codec::EmbedParams"
    _fields_ = (
        ("requests", pointer("const megakernel::codec::Frame")),
        ("frames", pointer("megakernel::codec::Frame")),
        ("num_frames", c_int),
        ("codebook_size", c_int),
        ("codebooks", pointer("const float")),
        ("inverse_frequencies", pointer("const float")),
        ("rope", pointer("float2")),
        ("half_head_dim", c_int),
        ("output", Activations),
    )


class AttentionParams(DeviceStruct):
    """The argument of the attention kernels."""

    __slots__ = ()
    CPP_NAME = "megakernel::codec::AttentionParams"
    _fields_ = (
        ("frames", pointer("const megakernel::codec::Frame")),
        ("num_frames", c_int),
        ("num_heads", c_int),
        ("head_dim", c_int),
        ("queries", pointer("const float")),
        ("kv_cache", pointer("const megakernel::f16")),
        ("kv_slot_stride", c_int64),
        ("kv_ring_size", c_int),
        ("output", Activations),
    )


class DepthwiseParams(DeviceStruct):
    """The argument of the depthwise convolution kernel."""

    __slots__ = ()
    CPP_NAME = "megakernel::codec::DepthwiseParams"
    _fields_ = (
        ("frames", pointer("const megakernel::codec::Frame")),
        ("num_rows", c_int),
        ("input", Activations),
        ("output", Activations),
        ("weights", pointer("const float")),
        ("bias", pointer("const float")),
        ("norm", pointer("const float")),
        ("eps", c_float),
    )


class SamplesParams(DeviceStruct):
    """The argument of the kernel of the last convolution."""

    __slots__ = ()
    CPP_NAME = "megakernel::codec::SamplesParams"
    _fields_ = (
        ("frames", pointer("const megakernel::codec::Frame")),
        ("num_rows", c_int),
        ("input", Activations),
        ("weights", pointer("const float")),
        ("bias", c_float),
        ("pcm", pointer("short")),
        ("non_finite", pointer("int")),
    )


class StateUpdateParams(DeviceStruct):
    """The argument of the state update kernel."""

    __slots__ = ()
    CPP_NAME = "megakernel::codec::StateUpdateParams"
    _fields_ = (
        ("frames", pointer("const megakernel::codec::Frame")),
        ("num_kept_frames", pointer("const int")),
        ("num_frames", c_int),
        ("num_layers", c_int),
        ("activations", Activations * MAX_HISTORIES),
    )


CODEC_DECLARATIONS: tuple[Declaration, ...] = (
    DeviceConstant("megakernel::codec::kAttentionWindow", ATTENTION_WINDOW),
    DeviceConstant("megakernel::codec::kStepChannels", STEP_CHANNELS),
    DeviceConstant("megakernel::codec::kMaxDepthwiseChannels", MAX_DEPTHWISE_CHANNELS),
    DeviceConstant("megakernel::codec::kBlockThreads", BLOCK_THREADS),
    DeviceConstant("megakernel::codec::kSampleThreads", SAMPLE_THREADS),
    DeviceConstant("megakernel::codec::kSampleBlockRows", SAMPLE_BLOCK_ROWS),
    DeviceConstant("megakernel::codec::kSampleRows", SAMPLE_ROWS),
    DeviceConstant("megakernel::codec::kSampleTaps", SAMPLE_TAPS),
    DeviceConstant("megakernel::codec::kAttentionWarps", ATTENTION_WARPS),
    DeviceConstant("megakernel::codec::kWarpgroupThreads", WARPGROUP_THREADS),
    DeviceConstant("megakernel::codec::kWarpgroupRows", WARPGROUP_ROWS),
    Epilogue,
    Frame,
    Activations,
    ProjectionParams,
    ResidualUnitParams,
    EmbedParams,
    AttentionParams,
    DepthwiseParams,
    SamplesParams,
    StateUpdateParams,
)
