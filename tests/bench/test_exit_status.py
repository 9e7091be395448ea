import pytest

from bench.exit_status import STATES, run_state


@pytest.mark.parametrize("state", STATES)
def test_the_exit_status_is_the_programs(state: str) -> None:
    assert run_state(state, 3, device="cpu") is None
