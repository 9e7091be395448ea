"""What Python and the encoder's kernels share; csrc/conformer/params.cuh explains it."""

from ctypes import c_float, c_int, c_int64

from megakernel_common.kernels.declarations import (
    Declaration,
    DeviceConstant,
    DeviceStruct,
    pointer,
)
from megakernel_stt.model.config import HOP_SIZE, NUM_STAGES

BLOCK_THREADS = 256
MAX_FEW_ROWS = 4  # that `project` takes

_NAMESPACE = "megakernel::conformer"


class NormPointers(DeviceStruct):
    """A layer normalisation."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::Norm"
    _fields_ = (("weight", pointer("const void")), ("bias", pointer("const void")))


class Streams(DeviceStruct):
    """The streams of a launch."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::Streams"
    _fields_ = (
        ("sources", pointer("const int64_t")),
        ("targets", pointer("const int64_t")),
        ("lengths", pointer("const int64_t")),
        ("num_frames", pointer("const int64_t")),
        ("chunk_size", c_int),
    )


class LogMelParams(DeviceStruct):
    """Features of a chunk."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::LogMelParams"
    _fields_ = (
        ("samples", pointer("const float")),
        ("counts", pointer("const int64_t")),
        ("window", pointer("const float")),
        ("twiddles", pointer("const float2")),
        ("filters", pointer("const float")),
        ("ranges", pointer("const int")),
        ("output", pointer("void")),
        ("num_samples", c_int),
        ("num_mels", c_int),
        ("num_bins", c_int),
        ("preemphasis", c_float),
        ("log_floor", c_float),
    )


class SubsampleParams(DeviceStruct):
    """A strided convolution of the subsampling."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::SubsampleParams"
    _fields_ = (
        ("streams", Streams),
        ("input", pointer("const void")),
        ("weights", pointer("const void")),
        ("bias", pointer("const void")),
        ("last", pointer("void")),
        ("slot_stride", c_int64),
        ("output", pointer("void")),
        ("stage", c_int),
        ("num_rows", c_int),
        ("num_bins", c_int),
        ("num_channels", c_int),
    )


class FlattenParams(DeviceStruct):
    """The end of the subsampling."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::FlattenParams"
    _fields_ = (
        ("streams", Streams),
        ("input", pointer("const void")),
        ("output", pointer("void")),
        ("num_frames", pointer("int64_t")),
        ("num_rows", c_int),
        ("num_bins", c_int),
        ("num_channels", c_int),
    )


class AddNormParams(DeviceStruct):
    """A residual and the norms that follow."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::AddNormParams"
    _fields_ = (
        ("x", pointer("void")),
        ("y", pointer("const void")),
        ("h", pointer("void")),
        ("norm_out", NormPointers),
        ("norm_next", NormPointers),
        ("scale", c_float),
    )


class ProjectParams(DeviceStruct):
    """A linear layer for few rows."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::ProjectParams"
    _fields_ = (
        ("input", pointer("const void")),
        ("weights", pointer("const void")),
        ("bias", pointer("const void")),
        ("norm_out", NormPointers),
        ("norm", NormPointers),
        ("normed_out", pointer("void")),
        ("residual", pointer("const void")),
        ("output", pointer("void")),
        ("num_rows", c_int),
        ("scale", c_float),
    )


class AttendParams(DeviceStruct):
    """Attention of a chunk."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::AttendParams"
    _fields_ = (
        ("streams", Streams),
        ("qkv", pointer("const void")),
        ("content_bias", pointer("const void")),
        ("position_bias", pointer("const void")),
        ("positions", pointer("const void")),
        ("keys", pointer("void")),
        ("values", pointer("void")),
        ("slot_stride", c_int64),
        ("output", pointer("void")),
        ("num_cached", c_int),
        ("root_head_dim", c_float),
    )


class ConvolveParams(DeviceStruct):
    """A convolution module between its products."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::ConvolveParams"
    _fields_ = (
        ("streams", Streams),
        ("input", pointer("const void")),
        ("weights", pointer("const void")),
        ("bias", pointer("const void")),
        ("norm", NormPointers),
        ("gated", pointer("void")),
        ("slot_stride", c_int64),
        ("output", pointer("void")),
    )


CONFORMER_DECLARATIONS: tuple[Declaration, ...] = (
    NormPointers,
    Streams,
    LogMelParams,
    SubsampleParams,
    FlattenParams,
    AddNormParams,
    ProjectParams,
    AttendParams,
    ConvolveParams,
    DeviceConstant(f"{_NAMESPACE}::kBlockThreads", BLOCK_THREADS),
    DeviceConstant(f"{_NAMESPACE}::kMaxFewRows", MAX_FEW_ROWS),
    DeviceConstant(f"{_NAMESPACE}::kNumStages", NUM_STAGES),
    DeviceConstant(f"{_NAMESPACE}::kHopSize", HOP_SIZE),
)
