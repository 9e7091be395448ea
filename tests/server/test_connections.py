"""Clients that send nothing, slowly, or without end."""

import asyncio
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import trustme
import uvicorn
import websockets
from websockets.frames import Frame, Opcode

from bench.cartesia import cartesia_message
from megakernel_tts import TTS
from megakernel_tts.server import connections, http, serving
from megakernel_tts.server.connections import BoundedHttpProtocol, PingedWebSocketProtocol
from megakernel_tts.server.serving import Certificate, uvicorn_config
from megakernel_tts.server.settings import ServerSettings
from tests.fakes import TIMEOUT_S
from tests.server.running import (
    TEXT,
    Client,
    RunningServer,
    pcm_of,
    running_server,
    wait_until,
)

HEAD = b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\n"
HANDSHAKE = (
    b"GET /tts/websocket HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
DENSE_FORMAT = {"encoding": "pcm_f32le", "sample_rate": 48_000}
DEADLINE_S = 0.2


@pytest.fixture
def hasty(engine: TTS, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server with short deadlines."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 2 * DEADLINE_S)
    with running_server(engine) as server:
        yield server


def connect(server: RunningServer, receive_bytes: int | None = None) -> socket.socket:
    """A connection; a small receive buffer is full after little audio that is not read."""
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(TIMEOUT_S)
    host, port = server.authority.split(":")
    client.connect((host, int(port)))
    return client


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
        with suppress(OSError):  # the deadline may precede it
            connection.sendall(start)
        assert is_closed(connection)
    assert time.monotonic() - start_s >= 0.9 * DEADLINE_S


def test_bytes_now_and_then_do_not_extend_the_deadline(hasty: RunningServer) -> None:
    with connect(hasty) as connection:
        connection.sendall(HEAD)
        connection.settimeout(DEADLINE_S / 10)
        for _ in range(1000):
            try:
                connection.sendall(b"X-A: b\r\n")
                if not connection.recv(1 << 16):
                    return
            except TimeoutError:
                continue  # the connection is open
            except OSError:
                return
    raise AssertionError("the connection stays open")


def test_the_deadline_holds_for_later_requests_of_a_connection(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", DEADLINE_S)
        connection.sendall(HEAD)
        assert is_closed(connection)


def test_a_head_without_end_is_cut_off(server: RunningServer) -> None:
    with connect(server) as connection, pytest.raises(OSError):
        for _ in range(1000):
            connection.sendall(b"GET /health HTTP/1.1\r\nX: ".ljust(1 << 14, b"x"))


def test_a_large_head_below_the_bound_is_read(server: RunningServer) -> None:
    reply = httpx.get(f"{server.url}/health", headers={"X": "x" * (1 << 15)})
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("body", "timeout_s", "status"),
    [(b"{", 0.1, b"408"), (b"{" + b" " * (2 << 20), TIMEOUT_S, b"413")],
    ids=["late", "large"],
)
def test_a_late_or_large_body_is_refused_and_its_connection_closed(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    body: bytes,
    timeout_s: float,
    status: bytes,
) -> None:
    monkeypatch.setattr(http, "_BODY_TIMEOUT_S", timeout_s)
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 100000000\r\n\r\n")
        try:
            connection.sendall(body)
            assert connection.recv(12) == b"HTTP/1.1 " + status
        except ConnectionResetError:
            assert status == b"413"  # the reply is lost if more arrives after it
        assert is_closed(connection)


def shake_hands(server: RunningServer) -> socket.socket:
    """A WebSocket that answers no ping by itself."""
    client = connect(server, receive_bytes=1 << 12)
    client.sendall(HANDSHAKE)
    reply = b""
    while not reply.endswith(b"\r\n\r\n"):
        reply += client.recv(1)
    assert reply.startswith(b"HTTP/1.1 101")
    return client


def frame(opcode: Opcode, data: bytes) -> bytes:
    """A frame of a client."""
    return Frame(opcode, data).serialize(mask=True)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Hello there, ", {"continue": True, "auto_flush": False}),
        (TEXT * 500, {"output_format": DENSE_FORMAT}),
    ],
    ids=["a context that waits for text", "more audio than buffers hold"],
)
def test_a_websocket_whose_client_is_gone_is_closed(
    engine: TTS, monkeypatch: pytest.MonkeyPatch, text: str, fields: dict[str, Any]
) -> None:
    """As after a lost network, the client neither reads, answers a ping nor closes."""
    monkeypatch.setattr(serving, "_PING_S", 0.2)  # and no other limit ends the connection
    monkeypatch.setattr(serving, "UNREAD_TIMEOUT_S", 1e6)
    monkeypatch.setattr("megakernel_tts.server.playback.MAX_BEHIND_S", 1e6)
    opened, ping = threading.Event(), PingedWebSocketProtocol.send_keepalive_ping

    def ping_once_opened(protocol: PingedWebSocketProtocol) -> None:
        if opened.is_set():
            ping(protocol)
        else:
            protocol.schedule_ping()

    monkeypatch.setattr(PingedWebSocketProtocol, "send_keepalive_ping", ping_once_opened)
    message = json.dumps(cartesia_message(text, context_id="a", **fields)).encode()
    with running_server(engine) as server:
        num_open = psutil.Process().num_fds()
        with shake_hands(server) as client:
            client.sendall(frame(Opcode.TEXT, message))
            wait_until(lambda: server.num_streams == 1)
            opened.set()
            wait_until(
                lambda: server.metric('requests_success_total{finished_reason="abort"}') == 1
            )
            wait_until(lambda: server.metric("websocket_connections") == 0)
            wait_until(lambda: psutil.Process().num_fds() <= num_open + 1)  # that of the client


def post_speech(server: RunningServer) -> socket.socket:
    """A request for more audio than buffers hold."""
    body = json.dumps({"input": TEXT * 500, "response_format": "pcm", "sample_rate": 48_000})
    client = connect(server, receive_bytes=1 << 12)
    client.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return client


def speak_over_websocket(server: RunningServer) -> socket.socket:
    """A context with more audio than buffers hold."""
    client = shake_hands(server)
    message = cartesia_message(TEXT * 500, context_id="a", output_format=DENSE_FORMAT)
    client.sendall(frame(Opcode.TEXT, json.dumps(message).encode()))
    return client


@pytest.mark.parametrize("speak", [post_speech, speak_over_websocket])
def test_deadlines_end_with_the_request(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    speak: Callable[[RunningServer], socket.socket],
) -> None:
    """A stream and a WebSocket may last longer than it takes to request them."""
    deadlines: list[asyncio.TimerHandle] = []
    set_deadline = BoundedHttpProtocol._set_deadline

    def recorded(protocol: BoundedHttpProtocol, seconds: float) -> None:
        set_deadline(protocol, seconds)
        assert protocol._deadline is not None
        deadlines.append(protocol._deadline)

    monkeypatch.setattr(BoundedHttpProtocol, "_set_deadline", recorded)
    with speak(server) as client:
        assert client.recv(1)
        assert deadlines and all(deadline.cancelled() for deadline in deadlines)


@pytest.mark.parametrize("speak", [post_speech, speak_over_websocket])
def test_a_connection_whose_client_reads_nothing_is_dropped(
    engine: TTS,
    monkeypatch: pytest.MonkeyPatch,
    speak: Callable[[RunningServer], socket.socket],
) -> None:
    """Although what was sent to it can never be delivered."""
    monkeypatch.setattr(serving, "UNREAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr("megakernel_tts.server.playback.MAX_BEHIND_S", 1e6)
    with running_server(engine) as server:
        num_open = psutil.Process().num_fds()
        with speak(server):
            wait_until(
                lambda: server.metric('requests_success_total{finished_reason="abort"}') == 1
            )
            wait_until(lambda: psutil.Process().num_fds() <= num_open + 1)  # that of the client


@pytest.mark.parametrize("speak", [post_speech, speak_over_websocket])
def test_a_client_that_is_behind_is_disconnected_without_an_error_of_the_server(
    engine: TTS,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    speak: Callable[[RunningServer], socket.socket],
) -> None:
    """It is behind once what buffers hold was played, and they are still full."""
    monkeypatch.setattr("megakernel_tts.server.playback.MAX_BEHIND_S", 0.0)
    caplog.set_level(logging.INFO, "megakernel_tts.server")
    with running_server(engine) as server, speak(server) as client:
        wait_until(lambda: server.metric('requests_success_total{finished_reason="abort"}') == 1)
        assert is_closed(client)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    (line,) = [record.__dict__ for record in caplog.records if record.getMessage() == "speech"]
    assert line["fields"]["finish_reason"] == "abort"
    assert line["fields"]["error"] == "slow_client"


def test_a_websocket_is_open_while_its_client_answers_pings(
    engine: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configured(*arguments: Any) -> uvicorn.Config:
        config = uvicorn_config(*arguments)
        config.ws_ping_interval, config.ws_ping_timeout = 0.01, TIMEOUT_S
        return config

    monkeypatch.setattr("bench.running_server.uvicorn_config", configured)
    with running_server(engine) as server, shake_hands(server) as client:
        for _ in range(3):
            ping = client.recv(6)
            assert ping[:2] == bytes((0x80 | Opcode.PING, 4))
            client.sendall(frame(Opcode.PONG, ping[2:]))


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


def test_connections_beyond_the_bound_are_refused(engine: TTS) -> None:
    with running_server(engine, ServerSettings(max_connections=2)) as server:
        with shake_hands(server), shake_hands(server):
            refused = httpx.get(f"{server.url}/version")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_connections"
            assert refused.headers["connection"] == "close" and refused.headers["retry-after"]
            with connect(server) as further:
                further.sendall(HANDSHAKE)
                assert further.recv(1 << 12).startswith(b"HTTP/1.1 503")
                assert is_closed(further)
            assert httpx.get(f"{server.url}/health").status_code == 200
        wait_until(lambda: httpx.get(f"{server.url}/version").status_code == 200)


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
