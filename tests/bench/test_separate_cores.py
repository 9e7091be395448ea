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


def test_the_rest_has_half_of_the_cores_at_least() -> None:
    with separate_cores(len(AVAILABLE) // 2 + 1) as cores:
        assert not cores
        assert sys.platform != "linux" or os.sched_getaffinity(0) == AVAILABLE
