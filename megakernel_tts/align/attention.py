"""Where heads of attention look -> how well each frame fits each unit of the text."""

import numpy as np
from numpy.typing import NDArray

_LEAST = np.finfo(np.float32).min
_TINY = np.finfo(np.float32).tiny


def unit_log_attention(
    scores: NDArray[np.float32], firsts: NDArray[np.int64], floor: float
) -> NDArray[np.float32]:
    """The mean over the heads of the logarithm of the attention that a unit gets among the text.

    Args:
        scores: [frames, heads, tokens] before the softmax, NaN where there is no key yet.
        firsts: Each unit's first token, the first of them 0.
        floor: The least attention, so that no head alone rules a unit out.

    Returns:
        [frames, units], the columns of the search: -inf where a unit has no key yet, except that
        the first unit may be spoken before anything is known.
    """
    peak = scores.max(2, keepdims=True)  # NaN where a key is missing
    missing = np.isnan(scores[:, 0]) if np.isnan(peak).any() else None  # for all heads or for none
    if missing is not None:
        scores = np.where(missing[:, None], -np.inf, scores)
        peak = np.maximum(scores.max(2, keepdims=True), _LEAST)
    units = np.add.reduceat(np.exp(scores - peak), firsts, axis=2)
    units /= units.sum(2, keepdims=True) + _TINY
    np.maximum(units, floor, out=units)
    np.log(units, out=units)
    found = units.mean(1) if units.shape[1] > 1 else units[:, 0]
    if missing is not None:
        found[missing[:, firsts]] = -np.inf
        found[np.isneginf(found[:, 0]), 0] = 0.0
    return found
