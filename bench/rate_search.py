"""Finds the largest rate of requests that a service holds."""

import math
from collections.abc import Callable, Mapping
from itertools import takewhile

_RESOLUTION = 1.05  # between the largest rate that holds and one that does not
_MAX_DOUBLINGS = 4  # and halvings, beyond the rates that were measured


def largest_held(measured: Mapping[float, bool]) -> float | None:
    """The largest measured rate that a service holds, as it does all lower ones; None if none.

    Args:
        measured: Rates that were measured, and whether the service held them.
    """
    held = list(takewhile(measured.__getitem__, sorted(measured)))
    return held[-1] if held else None


def find_largest_rate(
    holds: Callable[[float], bool], measured: Mapping[float, bool]
) -> float | None:
    """Finds the largest rate that a service holds, within 5 %.

    Args:
        holds: Measures whether the service holds a rate.
        measured: Rates that were measured, and whether the service held them; at least one.

    Returns:
        Requests per second; None if the service holds no rate.
    """
    low, high = _bracket(holds, measured)
    if low is None:
        return None
    while high is not None and high > _RESOLUTION * low:
        rate = _rounded(math.sqrt(low * high))
        if rate in (low, high):
            break
        low, high = (rate, high) if holds(rate) else (low, rate)
    return low


def _bracket(
    holds: Callable[[float], bool], measured: Mapping[float, bool]
) -> tuple[float | None, float | None]:
    """A rate that holds, and a higher one that does not; None for one that was not found."""
    low = largest_held(measured)
    high = min((rate for rate, held in measured.items() if not held), default=None)
    rate = low if high is None else high
    assert rate is not None, "at least one rate was measured"
    for _ in range(_MAX_DOUBLINGS):
        if low is not None and high is not None:
            break
        rate = _rounded(2 * rate if high is None else rate / 2)
        if holds(rate):
            low = rate
        else:
            high = rate
    return low, high


def _rounded(rate: float) -> float:
    """A rate with three digits."""
    return float(f"{rate:.3g}")
