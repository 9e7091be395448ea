import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import server_overhead
from bench.server_overhead import main, run
from bench.server_process import EngineSource
from bench.timed_device import H200_TIMES
from tests.fakes import TIMEOUT_S


def test_the_server_and_the_engine_are_measured_alone_and_beside_others() -> None:
    figures = asyncio.run(run(EngineSource(8), 10, num_others=2))
    assert {*figures} == {"websocket", "http", "websocket_beside_2_sockets"}
    device_ms = H200_TIMES.prompt_of(1) + H200_TIMES.frame_of(1)
    for figure in figures.values():
        assert device_ms <= figure["engine_p50"] <= figure["engine_p95"]
        assert device_ms <= figure["server_p50"] <= figure["server_p95"]
        added = figure["server_p50"] - figure["engine_p50"]
        assert abs(figure["added_p50"] - added) < 0.02
    cancelled = {name for name, each in figures.items() if "messages_after_cancel" in each}
    assert cancelled == {"websocket", "websocket_beside_2_sockets"}


def refuse_message(message: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda *text, **fields: message(*text, **fields) | {"voice": "missing"}


def refuse_body(dumps: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda fields: dumps(fields | ({"voice": "missing"} if "input" in fields else {}))


@pytest.mark.parametrize("protocol", ["websocket", "http"])
def test_a_refusal_ends_the_measurement(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    if protocol == "websocket":
        message = refuse_message(server_overhead.cartesia_message)
        monkeypatch.setattr(server_overhead, "cartesia_message", message)
    else:
        module = SimpleNamespace(dumps=refuse_body(json.dumps), loads=json.loads)
        monkeypatch.setattr(server_overhead, "json", module)

    async def measure() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await run(EngineSource(8), 10, num_others=2)

    with pytest.raises(RuntimeError, match="The server has refused speech"):
        asyncio.run(measure())


def test_the_server_has_cores_of_its_own_if_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requested: list[int] = []
    of_server: list[Sequence[int]] = []

    @contextmanager
    def separate(number: int) -> Any:
        requested.append(number)
        yield [7, 9]

    def server_process(_source: EngineSource, cores: Sequence[int] = ()) -> Any:
        of_server.append(cores)
        raise InterruptedError

    async def measured(source: EngineSource, requests: int, cores: Sequence[int]) -> dict[str, Any]:
        with pytest.raises(InterruptedError):
            await run(source, requests, cores)
        return {}

    file = tmp_path / "figures.json"
    monkeypatch.setattr(server_overhead, "separate_cores", separate)
    monkeypatch.setattr(server_overhead, "server_process", server_process)
    monkeypatch.setattr(server_overhead, "run", measured)
    monkeypatch.setattr(sys, "argv", ["bench.server_overhead", "--json", str(file)])
    main()
    assert (requested, of_server) == ([4], [[7, 9]])
    assert json.loads(file.read_text())["server_cores_alone"] == 2
