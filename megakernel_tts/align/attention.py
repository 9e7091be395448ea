"""Scores of frames against units of text, from the attention of the alignment heads."""

import numpy as np
from numpy.typing import NDArray

_MIN = np.finfo(np.float32).min
_TINY = np.finfo(np.float32).tiny


def unit_log_attention(
    scores: NDArray[np.float32], unit_starts: NDArray[np.int64], floor: float
) -> NDArray[np.float32]:
    """Computes the logarithm of the attention to each unit of the text, averaged over the heads.

    The attention is normalised over the text's tokens.

    Args:
        scores: [frames, heads, tokens], before the softmax; NaN where a token has no key yet.
        unit_starts: [units], the first token of each unit; 0 for the first unit.
        floor: Minimum attention, so that a single head cannot exclude a unit.

    Returns:
        [frames, units], the columns of `OnlineSearch`. A unit without a key is -inf. In a frame
        without any key, the first unit is 0.
    """
    peak = scores.max(2, keepdims=True)  # NaN where a key is missing
    # A key is missing for all heads or for none.
    missing = np.isnan(scores[:, 0]) if np.isnan(peak).any() else None
    if missing is not None:
        scores = np.where(missing[:, None], -np.inf, scores)
        peak = np.maximum(scores.max(2, keepdims=True), _MIN)
    units = np.add.reduceat(np.exp(scores - peak), unit_starts, axis=2)
    units /= units.sum(2, keepdims=True) + _TINY
    np.maximum(units, floor, out=units)
    np.log(units, out=units)
    columns = units.mean(1) if units.shape[1] > 1 else units[:, 0]
    if missing is not None:
        columns[missing[:, unit_starts]] = -np.inf
        columns[np.isneginf(columns[:, 0]), 0] = 0.0
    return columns
