"""The codec's kernels on a host without a GPU: csrc/codec compiled with emulated instructions."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p

from torch import Tensor

from tests.emulator.build import load_library


class EmulatedCodec:
    """What `torch.ops.megakernel_tts` has for the codec on a GPU."""

    def __init__(self, num_sms: int = 4) -> None:
        """Compiles the kernels.

        Args:
            num_sms: Multinum_sms that the tiles are chosen for.
        """
        self._library = load_library("emulate_codec.cc")
        self._num_sms = num_sms

    def codec_embed(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        self._library.codec_embed(*_arrays(tensors, numbers))

    def codec_project(self, tensors: Sequence[Tensor], numbers: Sequence[int], eps: float) -> None:
        self._library.codec_project(*_arrays(tensors, numbers), c_double(eps), c_int(self._num_sms))

    def codec_attend(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        self._library.codec_attend(*_arrays(tensors, numbers))

    def codec_depthwise(
        self, tensors: Sequence[Tensor], numbers: Sequence[int], eps: float
    ) -> None:
        self._library.codec_depthwise(*_arrays(tensors, numbers), c_double(eps))

    def codec_update_state(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        self._library.codec_update_state(*_arrays(tensors, numbers), c_int((len(tensors) - 2) // 2))


def _arrays(
    tensors: Sequence[Tensor], numbers: Sequence[int]
) -> tuple[ctypes.Array[c_void_p], ctypes.Array[c_int64]]:
    addresses = [t.data_ptr() if t.numel() else None for t in tensors]
    return (c_void_p * len(tensors))(*addresses), (c_int64 * len(numbers))(*numbers)
