"""Kernels that start before the previous one ends, see tests/emulator/prerequisites.h."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from megakernel_common.kernels.module import LaunchConfig


class PrerequisiteWrites:
    """What the kernels of a library write, for the kernel behind each."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Begins without a kernel."""
        self._add = library.add_prerequisite_write
        self._add.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._before: list[tuple[Tensor, Tensor]] = []  # a tensor, and its contents before
        self._hidden = self._before

    def before_launch(self, config: LaunchConfig, writes: Sequence[Tensor]) -> None:
        """Passes the writes of the previous kernel to the library if the next one starts early."""
        self._hidden = self._before  # in use until the kernel has run
        if config.overlap_previous:
            for tensor, before in self._hidden:
                self._add(tensor.data_ptr(), before.data_ptr(), tensor.nbytes)
        assert all(tensor.is_contiguous() for tensor in writes)
        self.add(*((tensor, tensor.clone()) for tensor in writes))

    def add(self, *before: tuple[Tensor, Tensor]) -> None:
        """Sets what the last kernel has written: tensors, and their contents before."""
        self._before = [*before]
