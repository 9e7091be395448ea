import os
import sys

import pytest

from bench.load import LoadClients
from bench.separate_cores import separate_cores

AVAILABLE = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()


@pytest.mark.skipif(len(AVAILABLE) < 2, reason="needs two cores")
def test_clients_have_cores_of_their_own() -> None:
    with separate_cores(1) as cores:
        with LoadClients.start(1, cores) as clients:
            (client,) = (process.pid for process in clients._processes)
            assert os.sched_getaffinity(client) == {*cores} < AVAILABLE
        assert os.sched_getaffinity(0) == AVAILABLE - {*cores}
    assert os.sched_getaffinity(0) == AVAILABLE


@pytest.mark.parametrize(("number", "clients"), [(1, [9]), (2, [7, 9]), (3, [])])
def test_the_rest_has_half_of_the_cores_at_least(
    monkeypatch: pytest.MonkeyPatch, number: int, clients: list[int]
) -> None:
    used = [{1, 3, 5, 7, 9}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: used[-1], raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cores: used.append({*cores}), raising=False
    )
    with separate_cores(number) as cores:
        assert [*cores] == clients
        assert used[-1] == used[0] - {*clients}
    assert used[-1] == used[0]
