import asyncio
import threading
from typing import Any

import pytest

from bench.virtual_time import VirtualTimeLoop, run_in_virtual_time

LIMIT_S = 300.0  # that `asyncio.Runner` sets since Python 3.12


def test_the_clock_jumps_to_the_next_timer() -> None:
    async def act() -> float:
        await asyncio.sleep(LIMIT_S)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(act(), 2 * LIMIT_S) == LIMIT_S


def test_the_clock_stands_still_while_the_executor_is_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = threading.Event()

    async def act() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        shutdown = loop._executor.shutdown

        def shutdown_slowly(**options: Any) -> None:
            passed.wait(0.1)  # a clock that runs jumps to the limit at once
            shutdown(**options)

        monkeypatch.setattr(loop._executor, "shutdown", shutdown_slowly)
        loop.call_later(LIMIT_S, passed.set)
        await loop.shutdown_default_executor(LIMIT_S)
        return loop.time()

    assert run_in_virtual_time(act(), 2 * LIMIT_S) == 0.0
    assert not passed.is_set()
