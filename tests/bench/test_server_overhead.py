import asyncio

from bench.server_overhead import run
from bench.server_process import EngineSource


def test_the_server_and_the_engine_are_measured_alone_and_beside_others() -> None:
    figures = asyncio.run(run(EngineSource(8, 0.005), 10, num_others=2))
    assert {*figures} == {"websocket", "http", "websocket_beside_2_sockets"}
    for figure in figures.values():
        assert 5 <= figure["engine_p50"] <= figure["engine_p95"]  # a frame takes 5 ms
        assert 5 <= figure["server_p50"] <= figure["server_p95"]
        added = figure["server_p50"] - figure["engine_p50"]
        assert abs(figure["added_p50"] - added) < 0.02
    cancelled = {name for name, each in figures.items() if "messages_after_cancel" in each}
    assert cancelled == {"websocket", "websocket_beside_2_sockets"}
