"""Runs a server's application on a socket until a stop signal, then lets its streams finish."""

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn

from megakernel_tts.server.app import Server

MAX_MESSAGE_BYTES = 1 << 20  # of a WebSocket
_SEND_BUFFER_BYTES = (
    1 << 16
)  # of a connection: 1.4 s of PCM, where the kernel's default is a minute
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_CLOSE_TIMEOUT_S = 5
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


def uvicorn_config(server: Server) -> uvicorn.Config:
    """The settings of uvicorn for a server."""
    return uvicorn.Config(
        server.app,
        lifespan="on",
        log_level="warning",  # the log of requests would hold keys that are query parameters
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # costs time, and audio hardly shrinks
    )


def serve(server: Server, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT, and returns when all streams have finished.

    After the signal, `/ready` reports 503 and new streams are refused. A second signal, or the end
    of the drain timeout, stops the streams.

    Args:
        server: The application.
        listener: From `bind`.
    """
    _DrainingServer(server).run(sockets=[listener])


class _DrainingServer(uvicorn.Server):
    """A server that serves during its drain, and returns after it instead of raising the signal."""

    def __init__(self, server: Server) -> None:
        super().__init__(uvicorn_config(server))
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
