import asyncio
import os
import sys

import httpx
import psutil
import pytest

from bench.server_process import EngineSource, server_process
from megakernel_tts.backends.megakernel import Megakernel

AVAILABLE = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()


def test_without_a_model_the_engine_is_that_of_a_gpu_over_a_simulated_device() -> None:
    with EngineSource(1).load() as tts:
        assert isinstance(tts._loaded.engine.backend, Megakernel)


@pytest.mark.skipif(len(AVAILABLE) < 2, reason="needs two cores")
def test_a_server_has_the_cores_that_it_was_given() -> None:
    cores = [max(AVAILABLE)]

    async def run() -> list[list[int]]:
        async with server_process(EngineSource(1), cores) as authority:
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"http://{authority}/ready")).status_code == 200
            return [child.cpu_affinity() for child in psutil.Process().children()]

    assert cores in asyncio.run(run())
