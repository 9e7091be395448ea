"""A re-statement of Super-MAS's algorithm in Triton, for machines without the package.

It follows the paper (Super Monotonic Alignment Search, 2024): one warp per item processes a column
at a time. It writes the sums over the scores in global memory, and the next column reads them.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]  # with CUDA's torch
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


@triton.jit
def _kernel(path, value, text, frames, tokens, columns, none, BLOCK: tl.constexpr):  # noqa: N803
    item = tl.program_id(0)
    offset = item.to(tl.int64) * tokens * columns
    path += offset
    value += offset
    t = tl.load(text + item)
    s = tl.load(frames + item)
    rows = tl.arange(0, BLOCK)
    inside = rows < t
    for column in range(0, s):
        at = value + rows * columns + column
        stay = tl.load(at - 1, mask=inside & (rows < column), other=none)
        move = tl.load(at - columns - 1, mask=inside & (rows > 0) & (column > 0), other=none)
        move = tl.where((rows == 0) & (column == 0), 0.0, move)
        tl.store(at, tl.maximum(stay, move) + tl.load(at, mask=inside), mask=inside)
    row = t - 1
    for back in range(0, s):
        column = s - 1 - back
        tl.store(path + row * columns + column, 1)
        if row > 0:
            at = value + row * columns + column
            if row == column or tl.load(at - 1) < tl.load(at - columns - 1):
                row -= 1


def maximum_path(value: Tensor, mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns zeros and ones [B, T, S]; overwrites `value` [B, T, S], as Super-MAS does."""
    items, tokens, columns = value.shape
    text = mask.sum(1)[:, 0].to(torch.int32)
    frames = mask.sum(2)[:, 0].to(torch.int32)
    value = value.masked_fill_(mask.logical_not(), 0)
    path = torch.zeros_like(value, dtype=dtype)
    block = triton.next_power_of_2(tokens)
    _kernel[(items,)](path, value, text, frames, tokens, columns, -1e32, BLOCK=block, num_warps=1)  # pyright: ignore[reportIndexIssue]  # how Triton launches
    return path
