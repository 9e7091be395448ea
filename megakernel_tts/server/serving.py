"""Runs a server's application on a socket until a stop signal, then lets its streams finish."""

import asyncio
import ipaddress
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn

from megakernel_tts.server.app import Server
from megakernel_tts.server.connections import BoundedHttpProtocol, PingedWebSocketProtocol

MAX_MESSAGE_BYTES = 1 << 20  # of a WebSocket
_SEND_BUFFER_BYTES = (
    1 << 16
)  # of a connection: 1.4 s of PCM, where the kernel's default is a minute
UNREAD_TIMEOUT_S = 60.0  # for which a client may read nothing of what was sent
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
CLOSE_TIMEOUT_S = 5
_PING_S = 20.0  # between pings of a WebSocket, and until a client that does not answer is closed
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """Opens a socket and listens; `serve` accepts its connections.

    Args:
        host: A name or address.
        port: 0 selects a free one.

    Raises:
        OSError: The host is unknown, or the port is in use.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by connections. A client that does not read then blocks its stream soon.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if sys.platform == "linux":
            # Also inherited. A connection is closed once its client has read all that was sent,
            # which a client that does not read would never do.
            timeout_ms = int(1000 * UNREAD_TIMEOUT_S)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def authority(listener: socket.socket) -> str:
    """Host and port of a socket, as in a URL."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class Certificate:
    """A TLS certificate.

    Attributes:
        chain: A PEM file with the certificate and those of its issuers.
        key: A PEM file with its private key.
    """

    chain: Path
    key: Path

    def check(self) -> None:
        """Checks the files.

        Raises:
            ValueError: They are no certificate and its key.
            OSError: One cannot be read.
        """
        for path in (self.chain, self.key):
            path.read_bytes()  # an error of SSL would not name the file
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.chain, self.key)
        except ssl.SSLError as error:
            raise ValueError(
                f"{self.chain} and {self.key} are no certificate and its private key in PEM format "
                f"({error})."
            ) from None


def uvicorn_config(server: Server, certificate: Certificate | None = None) -> uvicorn.Config:
    """The settings of uvicorn for a server.

    Args:
        server: The application.
        certificate: For TLS; None for plain HTTP.
    """
    return uvicorn.Config(
        server.app,
        http=partial(  # type: ignore[arg-type]
            BoundedHttpProtocol, max_connections=server.streams.settings.max_connections
        ),
        ssl_certfile=certificate.chain if certificate else None,
        ssl_keyfile=certificate.key if certificate else None,
        lifespan="on",
        log_config=None,  # the handlers of the root logger
        log_level="warning",
        access_log=False,  # it would hold keys that are query parameters
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        ws=PingedWebSocketProtocol,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=_PING_S,
        ws_ping_timeout=_PING_S,
        ws_per_message_deflate=False,  # costs time, and audio hardly shrinks
    )


async def serve(
    server: Server, listener: socket.socket, certificate: Certificate | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, and returns when all streams have finished.

    After the signal, `/ready` reports 503 and new streams are refused. A second signal, or the end
    of the drain timeout, stops the streams.

    Args:
        server: The application.
        listener: From `bind`.
        certificate: For TLS; None for plain HTTP.
    """
    await _DrainingServer(server, certificate).serve(sockets=[listener])


class _DrainingServer(uvicorn.Server):
    """A server that serves during its drain, and returns after it instead of raising the signal."""

    def __init__(self, server: Server, certificate: Certificate | None) -> None:
        super().__init__(uvicorn_config(server, certificate))
        self._streams = server.streams
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handles the stop signals; called by uvicorn."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())
        else:
            self.should_exit = self.force_exit = True

    async def _drain_and_exit(self) -> None:
        await self._streams.drain()
        self.should_exit = True
