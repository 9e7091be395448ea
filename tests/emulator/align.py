"""The alignment kernels on a CPU: csrc/align with emulated instructions."""

import ctypes
from ctypes import c_bool, c_int, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from tests.emulator.build import load_library

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Lengths(ctypes.Structure):
    _fields_ = (("per_item", c_void_p), ("is_int64", c_bool), ("common", c_int))


class _SearchParams(ctypes.Structure):
    _fields_ = (
        ("scores", c_void_p), ("item_stride", c_int64), ("row_stride", c_int64),
        ("num_items", c_int), ("num_rows", c_int), ("num_columns", c_int),
        ("text_lengths", _Lengths), ("frame_lengths", _Lengths), ("durations", c_void_p),
        ("num_strips", c_int), ("num_tiles", c_int), ("strips_per_block", c_int),
        ("blocks_per_item", c_int), ("num_stages", c_int),
        *((name, c_void_p) for name in ("block_counter", "done_counters", "edges", "directions")),
    )  # fmt: skip


class _MaskParams(ctypes.Structure):
    _fields_ = (
        ("mask", c_void_p), *((name, c_int64) for name in ("item", "row", "column")),
        *((name, c_int) for name in ("num_items", "num_rows", "num_columns", "element_bytes")),
        ("nonzero_bits", c_uint64),
        ("lengths", c_void_p),
    )  # fmt: skip


class _PathParams(ctypes.Structure):
    _fields_ = (
        ("durations", c_void_p), ("num_items", c_int), ("num_rows", c_int),
        ("num_columns", c_int), ("path", c_void_p), ("element_bytes", c_int),
        ("one_bits", c_uint64),
    )  # fmt: skip


class EmulatedAlign:
    """The kernels of csrc/align, with a chosen partition of the work."""

    def __init__(self) -> None:
        self._library = load_library("emulate_align.cc")
        assert self._library.align_search_bytes() == ctypes.sizeof(_SearchParams)

    def durations(
        self,
        scores: Tensor,
        text_lengths: Tensor | None = None,
        frame_lengths: Tensor | None = None,
        *,
        aligned: bool = False,
        strips_per_block: int = 2,
        num_stages: int = 1,
        late: int = 0,
    ) -> Tensor:
        """Computes durations int32 [B, T] of scores [B, T, S] whose frames are adjacent.

        Args:
            scores: float32, bfloat16 or float16.
            text_lengths: int32 or int64 [B], or none.
            frame_lengths: int32 or int64 [B], or none.
            aligned: Whether four cells are copied at a time.
            strips_per_block: Strips of a block, at most 2.
            num_stages: Tiles of scores of a strip in shared memory.
            late: Turns of the other blocks after which the first block starts.
        """
        items, rows, columns = scores.shape
        durations = torch.full((items, rows), -7, dtype=torch.int32)
        params = _SearchParams(
            scores=scores.data_ptr(), item_stride=scores.stride(0), row_stride=scores.stride(1),
            num_items=items, num_rows=rows, num_columns=columns,
            text_lengths=_lengths(text_lengths, rows),
            frame_lengths=_lengths(frame_lengths, columns), durations=durations.data_ptr(),
            num_stages=num_stages,
        )  # fmt: skip
        self._library.align_search(
            ctypes.byref(params), _TYPES[scores.dtype], aligned, strips_per_block, late
        )
        return durations

    def lengths(self, mask: Tensor) -> Tensor:
        """Counts the tokens and frames of a mask [B, T, S]: int32 [2, B]."""
        items, rows, columns = mask.shape
        out = torch.full((2, items), -7, dtype=torch.int32)
        bits = 8 * mask.element_size() - mask.is_floating_point()
        self._library.align_lengths(ctypes.byref(_MaskParams(
            mask.data_ptr(), *mask.stride(), items, rows, columns,
            element_bytes=mask.element_size(), nonzero_bits=2**bits - 1, lengths=out.data_ptr(),
        )))  # fmt: skip
        return out

    def path(self, durations: Tensor, frames: int, dtype: torch.dtype) -> Tensor:
        """Expands durations int32 [B, T] to zeros and ones [B, T, frames]."""
        items, rows = durations.shape
        out = torch.empty(items, rows, frames, dtype=dtype).fill_(7)
        one = torch.ones(1, dtype=dtype).view(torch.uint8).tolist()
        self._library.align_path(ctypes.byref(_PathParams(
            durations=durations.data_ptr(), num_items=items, num_rows=rows, num_columns=frames,
            path=out.data_ptr(), element_bytes=out.element_size(),
            one_bits=int.from_bytes(one, "little"),
        )))  # fmt: skip
        return out


def _lengths(lengths: Tensor | None, whole: int) -> _Lengths:
    if lengths is None:
        return _Lengths(None, False, whole)
    return _Lengths(lengths.data_ptr(), lengths.dtype == torch.int64, whole)
