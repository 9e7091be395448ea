import asyncio

import pytest

from bench import server_overhead
from bench.server_overhead import run
from bench.server_process import SIMULATED_TIMES, EngineSource


def test_the_server_and_the_engine_are_measured_alone_and_beside_others() -> None:
    figures = asyncio.run(run(EngineSource(8), 10, num_others=2))
    assert {*figures} == {"websocket", "http", "websocket_beside_2_sockets"}
    device_ms = SIMULATED_TIMES.prompt_of(1) + SIMULATED_TIMES.frame_of(1)
    for figure in figures.values():
        assert device_ms <= figure["engine_p50"] <= figure["engine_p95"]
        assert device_ms <= figure["server_p50"] <= figure["server_p95"]
        added = figure["server_p50"] - figure["engine_p50"]
        assert abs(figure["added_p50"] - added) < 0.02
    cancelled = {name for name, each in figures.items() if "messages_after_cancel" in each}
    assert cancelled == {"websocket", "websocket_beside_2_sockets"}


def test_a_refusal_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    message = server_overhead.cartesia_message
    monkeypatch.setattr(
        server_overhead,
        "cartesia_message",
        lambda *text, **fields: message(*text, **fields) | {"voice": "x"},
    )
    with pytest.raises(RuntimeError, match="There is no voice 'x'"):
        asyncio.run(run(EngineSource(8), 10, num_others=2))
