import asyncio

import pytest
import websockets

from bench.plain_socket import PlainSocket
from tests.fakes import TIMEOUT_S

SIZES = [0, 125, 126, 60_000]  # of messages; the longer ones have another header
LONG = 70_000  # which a server may send


async def converse() -> list[bytes]:
    """What a server echoes, and what it sends once its ping was answered."""

    async def serve(websocket: websockets.ServerConnection) -> None:
        for _ in SIZES:
            await websocket.send(await websocket.recv())
        await (await websocket.ping())
        await websocket.send("x" * LONG)

    received: list[bytes] = []
    async with websockets.serve(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with PlainSocket.connect("127.0.0.1", port, "/") as socket:
            for size in SIZES:
                socket.send(b"a" * size)
                received.append(await socket.receive())
            received.append(await socket.receive())
            with pytest.raises(ConnectionError, match="closes"):
                await socket.receive()
    return received


def test_messages_of_all_sizes_pass_and_pings_are_answered() -> None:
    received = asyncio.run(asyncio.wait_for(converse(), TIMEOUT_S))
    assert received == [*(b"a" * size for size in SIZES), b"x" * LONG]


async def connect_to_refusing_server() -> None:
    def refuse(connection: websockets.ServerConnection, _: object) -> websockets.Response:
        return connection.respond(404, "no such path")

    async def serve(_: websockets.ServerConnection) -> None:
        raise AssertionError("the handshake was refused")

    async with websockets.serve(serve, "127.0.0.1", 0, process_request=refuse) as server:
        port = server.sockets[0].getsockname()[1]
        async with PlainSocket.connect("127.0.0.1", port, "/nothing"):
            pass


def test_a_refused_handshake_is_an_error() -> None:
    with pytest.raises(ConnectionError, match=r"No WebSocket at /nothing: .* 404"):
        asyncio.run(asyncio.wait_for(connect_to_refusing_server(), TIMEOUT_S))
