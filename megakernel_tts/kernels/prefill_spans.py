"""Attention spans of prefill batches, which limit what one launch may run."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.kernels.structs import BATCH_COLUMNS


def num_launchable(records: NDArray[Any], span_size: int) -> int:
    """The number of leading batches that one launch may run: a column's spans may not decrease.

    A span that a column no longer uses keeps an old tag: csrc/exchange.cuh, point 5.

    Args:
        records: [batches], of type `PrefillBatch`.
        span_size: Positions of a span.
    """
    num_spans = _num_spans(records, span_size)
    decreases = (num_spans > 0) & (num_spans < np.maximum.accumulate(num_spans))
    (batches,) = np.nonzero(decreases.any(axis=1))
    return int(batches[0]) if len(batches) else len(records)


def _num_spans(records: NDArray[Any], span_size: int) -> NDArray[np.int32]:
    """The spans of earlier positions of each column, as `for_each_item` divides them.

    Returns:
        [batches, columns]; 0 for columns that a batch does not use.
    """
    columns, num_columns = records["columns"], records["num_columns"]
    rows = np.arange(len(records))[:, None]
    num_positions = columns["position"][rows, columns["first_column"]]
    num_spans = np.maximum(-(-num_positions // span_size), 1)
    return np.where(np.arange(BATCH_COLUMNS) < num_columns[:, None], num_spans, 0)
