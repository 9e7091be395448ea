"""Memory between inaccessible pages: a read outside of it ends the process."""

import ctypes
import mmap

import torch
from torch import Tensor


def guarded(cells: int, dtype: torch.dtype, at_end: bool) -> Tensor:
    """Allocates zeros [cells] between two inaccessible pages.

    Args:
        cells: Number of elements.
        dtype: Their dtype.
        at_end: Whether the elements end at the second page instead of beginning at the first.
    """
    size, page = cells * dtype.itemsize, mmap.PAGESIZE
    inner = -(-size // page) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + page + inner):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    first = page + (inner - size if at_end else 0)
    return torch.frombuffer(memoryview(memory)[first : first + size], dtype=dtype)
