"""The connection to `megakernel-tts serve`: a WebSocket, whose contexts are sessions."""

import asyncio
import json
import ssl
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pipecat_service.remote_messages import (
    foreign_server_error,
    lost_error,
    refusal_error,
    unreachable_error,
)
from pipecat_service.remote_session import RemoteSession

_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_TIMEOUT_S = 5.0  # of a handshake or a request
_CLOSE_TIMEOUT = aiohttp.ClientWSTimeout(ws_close=1.0)  # pyright: ignore[reportCallIssue]
_HEARTBEAT_S = 10.0  # between two pings; a connection without an answer is closed


@dataclass(eq=False)
class _Socket:
    """A WebSocket and its sessions.

    Attributes:
        websocket: The WebSocket.
        sessions: By context.
        outgoing: Messages to the server; None closes the WebSocket.
        draining: Whether the server stops: it finishes the open sessions and refuses others.
    """

    websocket: aiohttp.ClientWebSocketResponse
    sessions: dict[str, RemoteSession] = field(default_factory=dict)
    outgoing: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    draining: bool = False

    @property
    def usable(self) -> bool:
        """Whether new sessions can be opened, as far as is known."""
        return not self.websocket.closed and not self.draining

    def remove(self, context_id: str) -> None:
        """Removes a session that has ended."""
        self.sessions.pop(context_id, None)
        self._close_if_drained()

    def drain(self) -> None:
        """Closes the WebSocket after its last session."""
        self.draining = True
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self.draining and not self.sessions:
            self.outgoing.put_nowait(None)


class ServerConnection:
    """The connection to a server, opened at the first use and again after it was lost.

    When the server stops, new sessions use a new WebSocket, which may reach another server. The
    previous WebSocket stays open until its sessions have ended.

    Attributes:
        url: Address of the server.
        aligned: Whether the last words had times from the model's attention.
    """

    def __init__(
        self, url: str, api_key: str | None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        """Does not connect yet.

        Args:
            url: Address of the server.
            api_key: Its key, or None.
            ssl_context: For its certificate; None for the system's authorities.

        Raises:
            ValueError: `url` is no address of a server.
        """
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise ValueError(
                f"url is {url!r}; it must be the address of `megakernel-tts serve`, such as "
                "http://127.0.0.1:8000."
            )
        self.url = parts._replace(scheme=_SCHEMES[parts.scheme]).geturl().rstrip("/")
        self.aligned = False
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self._ssl_context = ssl_context
        self._http: aiohttp.ClientSession | None = None
        self._socket: _Socket | None = None  # of new sessions
        self._open: dict[_Socket, asyncio.Future[Any]] = {}  # done when the socket is closed
        self._connecting = asyncio.Lock()

    @property
    def connected(self) -> bool:
        """Whether the WebSocket can be used, as far as is known."""
        return self._socket is not None and self._socket.usable

    async def get_status(self) -> Mapping[str, Any]:
        """Requests `/status`.

        Raises:
            ServerError: It does not answer, refuses the key, or is another server.
        """
        async with self._errors(), self._client().get(f"{self.url}/status") as response:
            if response.status != 200:
                raise refusal_error(self.url, response.status)
            try:
                return await response.json()
            except (aiohttp.ContentTypeError, ValueError):
                raise foreign_server_error(self.url, "/status is no JSON") from None

    async def connect(self) -> None:
        """Opens the WebSocket, unless it can be used.

        Raises:
            ServerError: The server does not answer or refuses the key.
        """
        async with self._connecting:
            if self.connected:
                return
            async with self._errors():
                websocket = await self._client().ws_connect(
                    f"{self.url}/tts/websocket", heartbeat=_HEARTBEAT_S, timeout=_CLOSE_TIMEOUT
                )
            self._socket = socket = _Socket(websocket)
            closed = asyncio.gather(self._read(socket), self._write(socket), return_exceptions=True)
            self._open[socket] = closed
            closed.add_done_callback(lambda _: self._open.pop(socket))

    def _client(self) -> aiohttp.ClientSession:
        """The HTTP client, which belongs to the running event loop."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(ssl=self._ssl_context or True),
                timeout=aiohttp.ClientTimeout(total=None),  # `_errors` has one
            )
        return self._http

    @asynccontextmanager
    async def _errors(self) -> AsyncGenerator[None]:
        """Raises a `ServerError` for an error of the HTTP client."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                yield
        except aiohttp.WSServerHandshakeError as error:
            raise refusal_error(self.url, error.status) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise unreachable_error(self.url, error) from error

    def open_session(self, fields: Mapping[str, Any]) -> RemoteSession:
        """Opens a session on the WebSocket, after `connect`.

        Args:
            fields: Of its first message.
        """
        assert self._socket is not None, "connect() opens the WebSocket"
        context_id, socket = uuid.uuid4().hex, self._socket

        def send(message: Mapping[str, Any]) -> None:
            socket.outgoing.put_nowait(json.dumps({"context_id": context_id, **message}))

        session = RemoteSession(self.url, fields, send, lambda: socket.remove(context_id))
        socket.sessions[context_id] = session
        return session

    async def _write(self, socket: _Socket) -> None:
        """Sends messages in order; a slow network does not block a session."""
        with suppress(aiohttp.ClientError, ConnectionError):  # the reader reports it
            while (message := await socket.outgoing.get()) is not None:
                await socket.websocket.send_str(message)
            await socket.websocket.close()

    async def _read(self, socket: _Socket) -> None:
        """Passes events to their sessions, until the connection is lost."""
        error = lost_error(self.url)
        try:
            async for message in socket.websocket:
                if message.type is not aiohttp.WSMsgType.TEXT:  # a ping was not answered
                    break
                event = json.loads(message.data)
                if (session := socket.sessions.get(event["context_id"])) is not None:
                    session.receive(event)
                    if session.aligned is not None:
                        self.aligned = session.aligned
                if event.get("error_code") == "draining":
                    socket.drain()
        except (KeyError, TypeError, ValueError) as invalid:
            error = foreign_server_error(self.url, f"invalid event: {invalid!r}")
        finally:
            for session in [*socket.sessions.values()]:
                session.fail(error)
            socket.outgoing.put_nowait(None)  # ends the writer
            await socket.websocket.close()

    async def close(self) -> None:
        """Closes all WebSockets, which stops all sessions; may be called twice."""
        try:
            await asyncio.gather(*(socket.websocket.close() for socket in self._open))
            await asyncio.gather(*self._open.values())
        finally:
            self._socket = None
            if self._http is not None:
                http, self._http = self._http, None
                await http.close()
