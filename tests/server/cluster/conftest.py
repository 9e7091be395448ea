import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from bench.simulation import simulated_tts
from megakernel_tts import TTS
from megakernel_tts.server.cluster.client import EngineClient
from megakernel_tts.server.cluster.engine_cluster import EngineCluster
from tests.server.cluster.clusters import simulated_cluster, until

T = TypeVar("T")


class RunningCluster:
    """Two warm simulated engines, and the event loop that started them.

    Attributes:
        cluster: The engines.
    """

    def __init__(self, runner: asyncio.Runner, cluster: EngineCluster) -> None:
        self.cluster = cluster
        self._runner = runner

    @property
    def clients(self) -> list[EngineClient]:
        """The processes of the engines that are warm."""
        return self.cluster._warm_clients

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs a test, which must leave neither sessions nor rings in use.

        Engines that an earlier test has ended are started again before.
        """
        self._runner.run(until(lambda: len(self.clients) == 2))
        rings = self.num_free_rings
        result = self._runner.run(main)
        self._runner.run(until(lambda: self.loads == [0, 0]))
        assert self.num_free_rings == rings
        return result

    @property
    def loads(self) -> list[int]:
        """The number of sessions on each engine."""
        return [client.num_sessions for client in self.clients]

    @property
    def num_free_rings(self) -> int:
        """Rings that no session uses."""
        return sum(len(client._free_rings) for client in self.clients)


@pytest.fixture(scope="package")
def running() -> Iterator[RunningCluster]:
    """Shared, because starting processes takes seconds."""
    manager = simulated_cluster()
    with asyncio.Runner() as runner:
        yield RunningCluster(runner, runner.run(manager.__aenter__()))
        runner.run(manager.__aexit__(None, None, None))


@pytest.fixture(scope="package")
def local() -> Iterator[TTS]:
    """The same simulated model in this process."""
    with simulated_tts(num_slots=4, frame_seconds=0.001) as tts:
        tts.warmup()
        yield tts
