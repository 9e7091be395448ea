import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.rate_search import find_largest_rate, largest_held

RATES = (50.0, 100.0, 200.0)


@given(st.floats(3.2, 3100))
def test_the_largest_rate_is_found_within_five_percent(capacity: float) -> None:
    measured: list[float] = []

    def holds(rate: float) -> bool:
        measured.append(rate)
        return rate <= capacity

    largest = find_largest_rate(holds, {rate: rate <= capacity for rate in RATES})
    assert largest is not None and largest <= capacity < 1.07 * largest
    assert len(measured) == len({*measured}) <= 9 and not {*measured} & {*RATES}


@pytest.mark.parametrize(("holds", "largest"), [(True, 3200.0), (False, None)])
def test_the_search_ends_if_all_rates_are_alike(holds: bool, largest: float | None) -> None:
    assert find_largest_rate(lambda rate: holds, dict.fromkeys(RATES, holds)) == largest


def test_a_rate_above_one_that_does_not_hold_does_not_count() -> None:
    largest = find_largest_rate(lambda rate: rate < 60, {50: True, 100: False, 200: True})
    assert largest is not None and 50 <= largest < 60


def test_the_largest_rate_that_was_measured_counts_only_if_lower_ones_hold() -> None:
    assert largest_held({50: True, 200: True, 100: False}) == 50
    assert largest_held({100: True, 50: True}) == 100
    assert largest_held({50: False, 100: True}) is None
