"""Clients that send nothing, slowly, or without end."""

import asyncio
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import trustme
import websockets

from megakernel_tts import TTS
from megakernel_tts.server import connections, http, serving
from megakernel_tts.server.serving import Certificate
from tests.fakes import TIMEOUT_S
from tests.server.running import (
    TEXT,
    Client,
    RunningServer,
    connected,
    pcm_of,
    running_server,
    until,
    wait_until,
)

HEAD = b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\n"
DEADLINE_S = 0.2


@pytest.fixture
def hasty(engine: TTS, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server with short deadlines."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 2 * DEADLINE_S)
    with running_server(engine) as server:
        yield server


def connect(server: RunningServer) -> socket.socket:
    host, port = server.authority.split(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes a connection; what it sends before is dropped."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True  # a timeout of the socket raises


@pytest.mark.parametrize(
    "start",
    [b"", b"P", HEAD, HEAD + b"X-Long: ", HEAD + b"Content-Length: 10\r\n\r\n{"],
    ids=["nothing", "a byte", "a header", "part of a header", "part of a body"],
)
def test_connections_with_an_unfinished_request_are_closed(
    hasty: RunningServer, start: bytes
) -> None:
    start_s = time.monotonic()
    with connect(hasty) as connection:
        connection.sendall(start)
        assert is_closed(connection)
    assert time.monotonic() - start_s >= 0.9 * DEADLINE_S


def test_bytes_now_and_then_do_not_extend_the_deadline(hasty: RunningServer) -> None:
    with connect(hasty) as connection:
        connection.sendall(HEAD)
        for _ in range(1000):
            try:
                connection.sendall(b"X-A: b\r\n")
            except OSError:
                return
            time.sleep(DEADLINE_S / 10)
    raise AssertionError("the connection stays open")


def test_the_deadline_holds_for_later_requests_of_a_connection(hasty: RunningServer) -> None:
    with connect(hasty) as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.sendall(HEAD)
        assert is_closed(connection)


def test_a_head_without_end_is_cut_off(server: RunningServer) -> None:
    with connect(server) as connection, pytest.raises(OSError):
        for _ in range(1000):
            connection.sendall(b"GET /health HTTP/1.1\r\nX: ".ljust(1 << 14, b"x"))


def test_a_large_head_below_the_bound_is_read(server: RunningServer) -> None:
    reply = httpx.get(f"{server.url}/health", headers={"X": "x" * (1 << 15)})
    assert reply.status_code == 200


def test_a_late_or_large_body_is_refused_and_its_connection_closed(
    engine: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_BODY_TIMEOUT_S", 0.1)
    with running_server(engine) as server:
        for sent, status in ((b"{", b"408"), (b"{" + b" " * (2 << 20), b"413")):
            with connect(server) as connection:
                connection.sendall(HEAD + b"Content-Length: 100000000\r\n\r\n")
                try:
                    connection.sendall(sent)
                    assert connection.recv(12) == b"HTTP/1.1 " + status
                except ConnectionResetError:
                    assert status == b"413"  # the reply is lost if more arrives after it
                assert is_closed(connection)


def test_deadlines_end_with_the_request(hasty: RunningServer) -> None:
    """A stream and a WebSocket may last longer than it takes to request them."""

    async def act() -> None:
        async with connected(hasty) as client:
            start_s = time.monotonic()
            await client.send("a", TEXT * 2)  # 2 s, of which all but 1.5 s are paced
            events = await client.until_done("a")
            assert time.monotonic() - start_s > 2 * DEADLINE_S
            assert np.array_equal(pcm_of(events), hasty.speech(TEXT * 2))

    asyncio.run(act())


def test_a_websocket_whose_client_is_gone_is_closed(
    engine: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's host answers no ping, as after a lost network."""
    monkeypatch.setattr(serving, "_PING_S", 0.1)

    async def act(server: RunningServer) -> None:
        async with connected(server, close_timeout=0.1) as client:
            await client.send("a", TEXT * 500)
            await client.receive()
            client.websocket.transport.pause_reading()
            await until(lambda: server.num_streams == 0)
            assert server.metric("websocket_connections") == 0

    with running_server(engine) as server:
        asyncio.run(act(server))


def test_idle_connections_do_not_delay_others(server: RunningServer) -> None:
    idle = [connect(server) for _ in range(100)]
    try:
        reply = httpx.post(
            f"{server.url}/v1/audio/speech", json={"input": TEXT, "response_format": "pcm"}
        )
        assert np.array_equal(np.frombuffer(reply.content, "<i2"), server.speech())
    finally:
        for connection in idle:
            connection.close()


@pytest.fixture(scope="module")
def authority_and_certificate(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[ssl.SSLContext, Certificate]:
    """What a client trusts, and the certificate of a server on 127.0.0.1."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate = Certificate(folder / "cert.pem", folder / "key.pem")
    issued.private_key_pem.write_to_path(certificate.key)
    for blob in issued.cert_chain_pems:
        blob.write_to_path(certificate.chain, append=True)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    return trusted, certificate


def test_speech_over_tls(
    engine: TTS, authority_and_certificate: tuple[ssl.SSLContext, Certificate]
) -> None:
    trusted, certificate = authority_and_certificate
    certificate.check()

    async def act(server: RunningServer) -> None:
        url = f"wss://{server.authority}/tts/websocket"
        async with websockets.connect(url, ssl=trusted) as websocket:
            client = Client(websocket)
            await client.send("a", TEXT)
            events = await client.until_done("a")
        assert np.array_equal(pcm_of(events), server.speech())

    with running_server(engine, certificate=certificate) as server:
        reply = httpx.get(f"https://{server.authority}/v1/models", verify=trusted)
        assert reply.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/v1/models")
        asyncio.run(act(server))
        wait_until(lambda: server.num_streams == 0)


def test_files_that_are_no_certificate_are_refused(
    tmp_path: Path, authority_and_certificate: tuple[ssl.SSLContext, Certificate]
) -> None:
    _, certificate = authority_and_certificate
    with pytest.raises(ValueError, match="PEM"):
        Certificate(certificate.key, certificate.chain).check()
    with pytest.raises(FileNotFoundError):
        Certificate(tmp_path / "none", certificate.key).check()
