"""What Python and the alignment kernels share; csrc/align/params.cuh explains the fields."""

from ctypes import c_bool, c_int, c_int64, c_uint64

from megakernel_common.kernels.declarations import DeviceStruct, pointer


class Lengths(DeviceStruct):
    """Rows or columns of each item."""

    __slots__ = ()
    CPP_NAME = "megakernel::align::Lengths"
    _fields_ = (("per_item", pointer("const void")), ("is_int64", c_bool), ("common", c_int))


class SearchParams(DeviceStruct):
    """The argument of the search kernels."""

    __slots__ = ()
    CPP_NAME = "megakernel::align::SearchParams"
    _fields_ = (
        ("scores", pointer("const void")),
        ("item_stride", c_int64),
        ("row_stride", c_int64),
        ("num_items", c_int),
        ("num_rows", c_int),
        ("num_columns", c_int),
        ("text_lengths", Lengths),
        ("frame_lengths", Lengths),
        ("durations", pointer("int")),
        ("num_strips", c_int),
        ("num_tiles", c_int),
        ("strips_per_block", c_int),
        ("blocks_per_item", c_int),
        ("num_score_stages", c_int),
        ("block_counter", pointer("unsigned")),
        ("done_counters", pointer("unsigned")),
        ("edges", pointer("uint32_t")),
        ("directions", pointer("uint32_t")),
    )


class MaskParams(DeviceStruct):
    """The argument of the kernel that counts lengths."""

    __slots__ = ()
    CPP_NAME = "megakernel::align::MaskParams"
    _fields_ = (
        ("mask", pointer("const void")),
        ("item_stride", c_int64),
        ("row_stride", c_int64),
        ("column_stride", c_int64),
        ("num_items", c_int),
        ("num_rows", c_int),
        ("num_columns", c_int),
        ("element_bytes", c_int),
        ("nonzero_bits", c_uint64),
        ("lengths", pointer("int")),
    )


class PathParams(DeviceStruct):
    """The argument of the path kernels."""

    __slots__ = ()
    CPP_NAME = "megakernel::align::PathParams"
    _fields_ = (
        ("durations", pointer("const int")),
        ("num_items", c_int),
        ("num_rows", c_int),
        ("num_columns", c_int),
        ("path", pointer("void")),
        ("element_bytes", c_int),
        ("one_bits", c_uint64),
    )


class AlignInfo(DeviceStruct):
    """Facts about the alignment kernels that the host reads from the module."""

    __slots__ = ()
    CPP_NAME = "megakernel::align::AlignInfo"
    _fields_ = tuple(
        (name, c_int)
        for name in (
            "strip_rows",
            "tile_columns",
            "words_per_tile",
            "step_columns",
            "window_words",
            "padding_words",
            "max_strips_per_block",
            "max_blocks_per_sm",
            "max_score_stages",
            "float32_tile_bytes",
            "half_tile_bytes",
            "static_shared_bytes",
            "trace_shared_bytes",
            "length_threads",
            "path_threads",
            "path_rows",
        )
    )


ALIGN_DECLARATIONS = (Lengths, SearchParams, MaskParams, PathParams, AlignInfo)
