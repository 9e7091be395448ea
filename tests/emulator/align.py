"""The alignment's kernels on a host without a GPU: csrc/align with emulated instructions."""

import ctypes
from ctypes import c_bool, c_int, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from tests.emulator.build import load_library

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Lengths(ctypes.Structure):
    _fields_ = (("each", c_void_p), ("wide", c_bool), ("all", c_int))


class _Search(ctypes.Structure):
    _fields_ = (
        ("scores", c_void_p), ("item_stride", c_int64), ("row_stride", c_int64),
        ("items", c_int), ("rows", c_int), ("columns", c_int),
        ("text", _Lengths), ("frames", _Lengths), ("durations", c_void_p),
        *((name, c_int) for name in ("strips", "tiles", "warps", "chain", "stages")),
        *((name, c_void_p) for name in ("ticket", "done", "edges", "direction")),
    )  # fmt: skip


class _Mask(ctypes.Structure):
    _fields_ = (
        ("mask", c_void_p), *((name, c_int64) for name in ("item", "row", "column")),
        *((name, c_int) for name in ("items", "rows", "columns", "bytes")), ("digits", c_uint64),
        ("lengths", c_void_p),
    )  # fmt: skip


class _Path(ctypes.Structure):
    _fields_ = (
        ("durations", c_void_p), ("items", c_int), ("rows", c_int), ("columns", c_int),
        ("path", c_void_p), ("bytes", c_int), ("one", c_uint64),
    )  # fmt: skip


class EmulatedAlign:
    """The kernels of csrc/align, cut as one chooses."""

    def __init__(self) -> None:
        self._library = load_library("emulate_align.cc")
        assert self._library.align_search_bytes() == ctypes.sizeof(_Search)

    def durations(
        self,
        scores: Tensor,
        text_lengths: Tensor | None = None,
        frame_lengths: Tensor | None = None,
        *,
        aligned: bool = False,
        warps: int = 2,
        stages: int = 1,
        late: int = 0,
    ) -> Tensor:
        """int32 [B, T] of scores [B, T, S], of which the frames lie side by side.

        Args:
            scores: float32, bfloat16 or float16.
            text_lengths: int32 or int64 [B], or none.
            frame_lengths: Likewise.
            aligned: Whether a row is copied in four cells at a time.
            warps: That sum up, of a block: 2 at most.
            stages: Tiles of scores that a strip has room for.
            late: Turns of the other blocks after which the first begins.
        """
        items, rows, columns = scores.shape
        durations = torch.full((items, rows), -7, dtype=torch.int32)
        search = _Search(
            scores=scores.data_ptr(), item_stride=scores.stride(0), row_stride=scores.stride(1),
            items=items, rows=rows, columns=columns, text=_lengths(text_lengths, rows),
            frames=_lengths(frame_lengths, columns), durations=durations.data_ptr(), stages=stages,
        )  # fmt: skip
        self._library.align_search(ctypes.byref(search), _TYPES[scores.dtype], aligned, warps, late)
        return durations

    def lengths(self, mask: Tensor) -> Tensor:
        """int32 [2, B] of a mask [B, T, S]: tokens, then frames."""
        items, rows, columns = mask.shape
        out = torch.full((2, items), -7, dtype=torch.int32)
        bits = 8 * mask.element_size() - mask.is_floating_point()
        self._library.align_lengths(ctypes.byref(_Mask(
            mask.data_ptr(), *mask.stride(), items, rows, columns, bytes=mask.element_size(),
            digits=2**bits - 1, lengths=out.data_ptr(),
        )))  # fmt: skip
        return out

    def path(self, durations: Tensor, frames: int, dtype: torch.dtype) -> Tensor:
        """Zeros and ones [B, T, frames] of durations int32 [B, T]."""
        items, rows = durations.shape
        out = torch.empty(items, rows, frames, dtype=dtype).fill_(7)
        one = torch.ones(1, dtype=dtype).view(torch.uint8).tolist()
        self._library.align_path(ctypes.byref(_Path(
            durations=durations.data_ptr(), items=items, rows=rows, columns=frames,
            path=out.data_ptr(), bytes=out.element_size(), one=int.from_bytes(one, "little"),
        )))  # fmt: skip
        return out


def _lengths(lengths: Tensor | None, whole: int) -> _Lengths:
    if lengths is None:
        return _Lengths(None, False, whole)
    return _Lengths(lengths.data_ptr(), lengths.dtype == torch.int64, whole)
