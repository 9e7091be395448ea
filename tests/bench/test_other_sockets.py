import asyncio
import time

import pytest

from bench.other_sockets import other_sockets
from bench.running_server import served, wait_until
from bench.simulation import simulated_tts
from megakernel_tts.server.app import Server
from megakernel_tts.server.settings import ServerSettings
from tests.fakes import TIMEOUT_S

TEXT = "Hello there. My friend."


@pytest.mark.parametrize("number", [1, 3])
def test_all_of_them_speak_until_the_block_ends(number: int) -> None:
    with simulated_tts(4) as tts:
        tts.warmup()
        server = Server(tts)

        async def run(authority: str) -> None:
            async with other_sockets(authority, number, TEXT):
                await asyncio.to_thread(wait_until, lambda: server.streams.num_open == number)
                assert server.streams._num_websockets == number

        with served(server) as authority:
            asyncio.run(run(authority))
            wait_until(lambda: server.streams.num_open == 0)


def test_a_text_begins_when_the_one_before_was_played() -> None:
    with simulated_tts(1, 0.001) as tts:
        tts.warmup()
        server, seconds = Server(tts), tts.say(TEXT).seconds
        metrics = server.streams.metrics

        def has_begun_again() -> bool:
            lines = [line for line in metrics.text().splitlines() if ":requests_total{" in line]
            return sum(float(line.rpartition(" ")[2]) for line in lines) >= 2

        async def run(authority: str) -> float:
            begin_s = time.monotonic()
            async with other_sockets(authority, 1, TEXT):
                await asyncio.to_thread(wait_until, has_begun_again, TIMEOUT_S)
                return time.monotonic() - begin_s

        with served(server) as authority:
            assert asyncio.run(run(authority)) > seconds


def test_a_refused_stream_is_an_error_before_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    with simulated_tts(1) as tts:
        tts.warmup()

        async def run(authority: str) -> None:
            async with other_sockets(authority, 3, TEXT):
                raise AssertionError("two of three streams were refused")

        settings = ServerSettings(max_queue=0)
        with (
            served(Server(tts, settings)) as authority,
            pytest.raises(RuntimeError, match="failed"),
        ):
            asyncio.run(run(authority))
    assert "The server has refused speech" in capfd.readouterr().err
