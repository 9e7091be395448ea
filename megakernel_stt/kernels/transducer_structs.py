"""What Python and the transducer's kernels share; csrc/transducer/params.cuh explains fields."""

from ctypes import c_float, c_int

from megakernel_common.kernels.declarations import (
    Declaration,
    DeviceConstant,
    DeviceStruct,
    pointer,
)

MAX_BATCH = 64  # streams of a launch
MAX_COLUMNS = 64
TILE_ROWS = 16
STEP_K = 16
UNITS_PER_TILE = 4
NUM_KEY_BUFFERS = 3
MAX_LAYERS = 16

_NAMESPACE = "megakernel::transducer"


class WeightPointers(DeviceStruct):
    """A linear layer in operand order."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::Weights"
    _fields_ = (("data", pointer("const void")), ("bias", pointer("const void")))


class LstmLayerPointers(DeviceStruct):
    """A layer of the LSTM."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::LstmLayer"
    _fields_ = (("input", WeightPointers), ("hidden", WeightPointers))


class States(DeviceStruct):
    """States of streams, by slot."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::States"
    _fields_ = (
        ("hidden", pointer("void")),
        ("cell", pointer("void")),
        ("output", pointer("void")),
        ("num_frames", pointer("int64_t")),
        ("frame", pointer("int64_t")),
    )


class Result(DeviceStruct):
    """A token that a launch decoded; the first of a stream is a header."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::Result"
    _fields_ = (
        ("token", c_int),
        ("frame", c_int),
        ("duration", c_int),
        ("confidence", c_float),
    )


class Workspace(DeviceStruct):
    """Buffers of a launch."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::Workspace"
    _fields_ = (
        ("barrier", pointer("unsigned")),
        ("keys", pointer("uint64_t")),
        ("partials", pointer("float4")),
        ("hidden", pointer("void")),
        ("cell", pointer("void")),
        ("output", pointer("void")),
    )


class TransducerParams(DeviceStruct):
    """The argument of a launch."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::TransducerParams"
    _fields_ = (
        ("frames", pointer("const void")),
        ("lengths", pointer("const int")),
        ("sources", pointer("const int")),
        ("targets", pointer("const int")),
        ("states", States),
        ("embedding", pointer("const void")),
        ("layers", LstmLayerPointers * MAX_LAYERS),
        ("projector", WeightPointers),
        ("head", WeightPointers),
        ("durations", pointer("const int")),
        ("results", pointer(f"{_NAMESPACE}::Result")),
        ("workspace", Workspace),
        ("batch", c_int),
        ("num_frames", c_int),
        ("num_layers", c_int),
        ("vocab_size", c_int),
        ("num_durations", c_int),
        ("blank_id", c_int),
        ("max_symbols", c_int),
        ("max_results", c_int),
        ("least_certainty", c_float),
    )


class TransducerInfo(DeviceStruct):
    """Facts about a build."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::TransducerInfo"
    _fields_ = (
        ("num_threads", c_int),
        ("float32_shared_bytes", c_int),
        ("bfloat16_shared_bytes", c_int),
    )


TRANSDUCER_DECLARATIONS: tuple[Declaration, ...] = (
    WeightPointers,
    LstmLayerPointers,
    States,
    Result,
    Workspace,
    TransducerParams,
    TransducerInfo,
    DeviceConstant(f"{_NAMESPACE}::kMaxBatch", MAX_BATCH),
    DeviceConstant(f"{_NAMESPACE}::kMaxColumns", MAX_COLUMNS),
    DeviceConstant(f"{_NAMESPACE}::kTileRows", TILE_ROWS),
    DeviceConstant(f"{_NAMESPACE}::kStepK", STEP_K),
    DeviceConstant(f"{_NAMESPACE}::kUnitsPerTile", UNITS_PER_TILE),
    DeviceConstant(f"{_NAMESPACE}::kNumKeyBuffers", NUM_KEY_BUFFERS),
    DeviceConstant(f"{_NAMESPACE}::kMaxLayers", MAX_LAYERS),
)
