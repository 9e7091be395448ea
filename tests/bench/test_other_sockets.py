import asyncio

import pytest

from bench.other_sockets import other_sockets
from bench.running_server import served, wait_until
from bench.simulation import simulated_tts
from megakernel_tts.server.app import Server
from megakernel_tts.server.settings import ServerSettings

TEXT = "Hello there. My friend."


@pytest.mark.parametrize("number", [1, 3])
def test_all_of_them_speak_until_the_block_ends(number: int) -> None:
    with simulated_tts(4) as tts:
        tts.warmup()
        server = Server(tts)

        async def run(authority: str) -> None:
            async with other_sockets(authority, number, TEXT):
                await asyncio.to_thread(wait_until, lambda: server.streams.num_open == number)

        with served(server) as authority:
            asyncio.run(run(authority))
            wait_until(lambda: server.streams.num_open == 0)


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
