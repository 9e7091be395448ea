"""The connection to a server over TCP and TLS, and to other programs."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from aiohttp import web
from numpy.typing import NDArray
from pipecat.utils.errors import ErrorCategory

from megakernel_tts import TTS, Finish
from megakernel_tts.server.serving import Certificate
from pipecat_service.connection import ServerConnection
from pipecat_service.errors import ServerError
from pipecat_service.remote_messages import request_fields
from pipecat_service.remote_session import RemoteSession
from pipecat_service.settings import MegakernelTTSSettings, default_settings
from tests.fakes import TIMEOUT_S
from tests.server.running import LOCKED, TEXT, RunningServer, running_server, until

SETTINGS = replace(default_settings("simulated"), voice="ryan")


async def with_connection(
    use: Callable[[ServerConnection], Awaitable[None]],
    url: str,
    key: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> None:
    """Uses a connection and closes it."""
    connection = ServerConnection(url, key, ssl_context)
    try:
        await use(connection)
    finally:
        await connection.close()
        await transports_closed()


async def transports_closed() -> None:
    """Waits until TLS connections are closed, for which aiohttp does not wait."""
    loop: Any = asyncio.get_running_loop()
    async with asyncio.timeout(TIMEOUT_S):
        while any(transport._sock is not None for transport in loop._transports.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def collect(
    session: RemoteSession,
) -> tuple[NDArray[np.int16], list[tuple[str, float]], Finish]:
    """The audio, the words with their starts, and the end of a session."""
    pcm, words = [np.zeros(0, np.int16)], list[tuple[str, float]]()
    async with aclosing(aiter(session)) as events:
        async for event in events:
            if isinstance(event, Finish):
                return np.concatenate(pcm), words, event
            pcm.append(event.pcm)
            words += [(word.text, word.start) for word in event.words]
    raise AssertionError("the session has no end")


def open_session(
    connection: ServerConnection, settings: MegakernelTTSSettings = SETTINGS
) -> RemoteSession:
    return connection.open_session(request_fields(settings))


def assert_speech(server: RunningServer, pcm: NDArray[np.int16]) -> None:
    np.testing.assert_array_equal(pcm, server.speech())


def num_websockets(server: RunningServer) -> float:
    """The WebSockets that the server has open."""
    return server.metric("websocket_connections")


def test_speech_and_words_are_those_of_the_engine(engine: TTS) -> None:
    async def use(connection: ServerConnection) -> None:
        await connection.connect()
        sessions = [open_session(connection) for _ in range(2)]  # they speak at the same time
        for session in sessions:
            for word in TEXT.split():
                session.push_text(f"{word} ")
            session.end()
        for pcm, words, finish in await asyncio.gather(*map(collect, sessions)):
            assert words == [(word.text, word.start) for word in server.tts.say(TEXT).words]
            assert_speech(server, pcm)
            assert finish == Finish("eos", len(pcm) // 1920)

    with running_server(engine) as server:
        asyncio.run(with_connection(use, server.url))


def test_speech_over_tls_with_a_key(engine: TTS, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    issued.private_key_pem.write_to_path(certificate.key)
    issued.cert_chain_pems[0].write_to_path(certificate.chain)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)

    async def use(connection: ServerConnection) -> None:
        assert (await connection.get_status())["model"] == "simulated"
        await connection.connect()
        session = open_session(connection)
        session.push_text(TEXT)
        session.end()
        pcm, _, _ = await collect(session)
        assert_speech(server, pcm)

    async def fail(connection: ServerConnection) -> None:
        with pytest.raises(ServerError, match=r"cannot be reached .*certificate"):
            await connection.get_status()

    with running_server(engine, LOCKED, certificate=certificate) as server:
        url = f"wss://{server.authority}"
        asyncio.run(with_connection(use, url, "secret", trusted))
        asyncio.run(with_connection(fail, url, "secret"))


@pytest.mark.parametrize("key", [None, "other"])
def test_an_invalid_key_is_refused(engine: TTS, key: str | None) -> None:
    async def use(connection: ServerConnection) -> None:
        for call in (connection.get_status, connection.connect):
            with pytest.raises(ServerError, match="refused the API key") as caught:
                await call()
            assert caught.value.category is ErrorCategory.AUTHENTICATION

    with running_server(engine, LOCKED) as server:
        asyncio.run(with_connection(use, server.url, key))


def test_a_server_that_stops_is_left(engine: TTS) -> None:
    """Behind a load balancer, the next connection reaches another one."""

    async def use(connection: ServerConnection) -> None:
        await connection.connect()
        server.server.streams.draining = True
        session = open_session(connection)
        session.push_text(TEXT)
        *_, finish = await collect(session)
        assert isinstance(finish.error, ServerError) and "is stopping" in str(finish.error)
        assert finish.error.category is ErrorCategory.SERVER and not connection.connected
        await until(lambda: num_websockets(server) == 0)  # nothing speaks

    with running_server(engine) as server:
        asyncio.run(with_connection(use, server.url))


async def leave_while_speaking(
    connection: ServerConnection, server: RunningServer
) -> tuple[RemoteSession, RemoteSession]:
    """A session of a server that stops, which has some of its text, and one of the next server."""
    await connection.connect()
    speaking = open_session(connection)
    speaking.push_text(TEXT[:6])
    await until(lambda: server.num_streams == 1)
    server.server.streams.draining = True
    refused = open_session(connection)
    refused.push_text(TEXT)
    *_, finish = await collect(refused)
    assert "is stopping" in str(finish.error)
    server.server.streams.draining = False  # the next server
    await connection.connect()
    assert connection.connected and not speaking.finished
    await until(lambda: num_websockets(server) == 2)
    return speaking, open_session(connection)


def test_a_server_that_stops_finishes_its_sessions(engine: TTS) -> None:
    async def use(connection: ServerConnection) -> None:
        first, second = await leave_while_speaking(connection, server)
        first.push_text(TEXT[6:])
        first.end()
        pcm, _, finish = await collect(first)
        assert finish.reason == "eos"
        assert_speech(server, pcm)
        await until(lambda: num_websockets(server) == 1)
        second.push_text(TEXT)
        second.end()
        pcm, _, _ = await collect(second)
        assert_speech(server, pcm)
        assert connection.connected

    with running_server(engine) as server:
        asyncio.run(with_connection(use, server.url))


def test_an_interruption_leaves_a_server_that_stops(engine: TTS) -> None:
    async def use(connection: ServerConnection) -> None:
        first, _ = await leave_while_speaking(connection, server)
        first.cancel()
        await until(lambda: num_websockets(server) == 1 and server.num_streams == 0)
        assert connection.connected

    with running_server(engine) as server:
        asyncio.run(with_connection(use, server.url))


def test_closing_ends_the_sessions_of_all_servers(engine: TTS) -> None:
    async def use(connection: ServerConnection) -> None:
        sessions = await leave_while_speaking(connection, server)
        await connection.close()
        for *_, finish in await asyncio.gather(*map(collect, sessions)):
            assert isinstance(finish.error, ServerError)
            assert finish.error.category is ErrorCategory.CONNECTIVITY
        await until(lambda: num_websockets(server) == 0 and server.num_streams == 0)

    with running_server(engine) as server:
        asyncio.run(with_connection(use, server.url))


def test_a_refused_request_ends_its_session_only(engine: TTS) -> None:
    async def use(connection: ServerConnection) -> None:
        await connection.connect()
        refused = open_session(connection, replace(SETTINGS, voice="nobody"))
        spoken = open_session(connection)
        for session in (refused, spoken):
            session.push_text(TEXT)
            session.end()
        *_, finish = await collect(refused)
        assert isinstance(finish.error, ServerError)
        assert finish.error.category is ErrorCategory.INVALID_REQUEST
        assert "There is no voice 'nobody'; choose one of: ryan, serena." in str(finish.error)
        pcm, _, _ = await collect(spoken)
        assert_speech(server, pcm)

    with running_server(engine) as server:
        asyncio.run(with_connection(use, server.url))


async def not_found(_: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


async def page(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>", content_type="text/html")


async def foreign_events(request: web.Request) -> web.StreamResponse:
    """A WebSocket whose events are not those of the server."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    message = await socket.receive_json()
    await socket.send_json({"type": "chunk", "context_id": message["context_id"], "data": ""})
    await socket.receive()
    return socket


async def text_events(request: web.Request) -> web.StreamResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    await socket.receive()
    await socket.send_str("hello")
    await socket.receive()
    return socket


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def with_foreign_server(
    path: str, handler: Handler, use: Callable[[ServerConnection], Awaitable[None]]
) -> None:
    """Uses a connection to another program."""
    application = web.Application()
    application.router.add_get(path, handler)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        await with_connection(use, f"http://{host}:{port}")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("handler", [not_found, page])
def test_another_server_is_recognised(handler: Handler) -> None:
    async def use(connection: ServerConnection) -> None:
        with pytest.raises(ServerError, match="is not `megakernel-tts serve`"):
            await connection.get_status()

    asyncio.run(with_foreign_server("/status", handler, use))


@pytest.mark.parametrize("handler", [foreign_events, text_events])
def test_events_of_another_server_fail_the_session(handler: Handler) -> None:
    async def use(connection: ServerConnection) -> None:
        await connection.connect()
        session = open_session(connection)
        session.push_text(TEXT)
        *_, finish = await collect(session)
        assert "is not `megakernel-tts serve` of this version" in str(finish.error)

    asyncio.run(with_foreign_server("/tts/websocket", handler, use))


async def no_pongs(request: web.Request) -> web.StreamResponse:
    """A WebSocket over a network that has ceased to work."""
    socket = web.WebSocketResponse(autoping=False)
    await socket.prepare(request)
    async for _ in socket:
        pass
    return socket


def test_a_connection_without_pongs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipecat_service.connection._HEARTBEAT_S", 0.05)

    async def use(connection: ServerConnection) -> None:
        await connection.connect()
        session = open_session(connection)
        session.push_text(TEXT)
        *_, finish = await asyncio.wait_for(collect(session), TIMEOUT_S)
        assert isinstance(finish.error, ServerError)
        assert finish.error.category is ErrorCategory.CONNECTIVITY
        assert not connection.connected

    asyncio.run(with_foreign_server("/tts/websocket", no_pongs, use))


def test_a_server_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipecat_service.connection._TIMEOUT_S", 0.05)

    async def use(connection: ServerConnection) -> None:
        for call in (connection.get_status, connection.connect):
            with pytest.raises(ServerError, match=r"cannot be reached \(no answer in time\)"):
                await call()

    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts no connection
        host, port = listener.getsockname()
        asyncio.run(with_connection(use, f"http://{host}:{port}"))
