"""How the alignment kernels read scores."""

import math

import torch

from megakernel_tts.kernels.align import _row_alignment


def test_the_alignment_of_rows_is_that_of_all_their_addresses() -> None:
    whole = torch.empty(4, 6, 48, dtype=torch.bfloat16)
    for offset in range(9):
        for row_step in (1, 2, 3):
            for num_items, num_rows in ((1, 1), (1, 2), (3, 1), (3, 2)):
                rows = whole[:num_items, : num_rows * row_step : row_step, offset : offset + 5]
                addresses = [row.data_ptr() for item in rows for row in item]
                common = math.gcd(*addresses)
                assert _row_alignment(rows) == common & -common
