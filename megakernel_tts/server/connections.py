"""Connections beyond a number, and those of clients that are gone or slow, are closed."""

import asyncio
from copy import copy
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from megakernel_tts.server.auth import refusal

HEAD_TIMEOUT_S = 10.0  # from the connection, or the first byte of a request, to its last header
REQUEST_TIMEOUT_S = 60.0  # to the end of its body
MAX_HEAD_BYTES = 1 << 16

_INCOMPLETE = "megakernel_tts.incomplete"  # an extension of the scope
_HEALTH_PATH = "/health"  # a supervisor would restart a server that does not answer it


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on connections, on a request's head, and on its time.

    uvicorn itself bounds the time between requests, and with `limit_concurrency` the connections
    of HTTP requests, but not of WebSockets. A handler bounds the size of a body that it reads.
    `close_incomplete` ends a reply.
    """

    _deadline: asyncio.TimerHandle | None = None
    _num_head_bytes: int | None = 0  # so far; None outside of a head

    def __init__(self, *arguments: Any, max_connections: int, **keywords: Any) -> None:
        """Starts without a connection.

        Args:
            arguments: As in uvicorn's protocol.
            max_connections: Open connections of the server, WebSockets included. A request on a
                further one is refused, and that connection closed.
            keywords: As in uvicorn's protocol.
        """
        super().__init__(*arguments, **keywords)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._set_deadline(HEAD_TIMEOUT_S)
        if len(self.connections) > self._max_connections:
            self.app = partial(_refuse, self.app)
            self.config = copy(self.config)  # from which a WebSocket takes the application
            self.config.loaded_app = self.app

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        before = self._num_head_bytes
        super().data_received(data)
        if before is None or self._num_head_bytes is None:
            return
        self._num_head_bytes = before + len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._num_head_bytes = 0
        self._set_deadline(HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._num_head_bytes = None
        self._set_deadline(REQUEST_TIMEOUT_S)
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # no WebSocket
            self.scope["extensions"] = {_INCOMPLETE: {"close": partial(_disconnect, self.cycle)}}

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._clear_deadline()
        super().on_message_complete()

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


async def _refuse(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Stands in for the application on a connection beyond the bound."""
    if scope["path"] == _HEALTH_PATH:
        await app(scope, receive, send)
        return
    refused = refusal(503, "The server has too many connections.", "too_many_connections")
    refused.headers.update({"Connection": "close", "Retry-After": "1"})
    await refused(scope, receive, send)


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True  # else uvicorn logs a reply without an end as an error of its own
    cycle.transport.close()


def close_incomplete(scope: Scope) -> None:
    """Closes the connection of a reply after what was sent, without the end that a client expects.

    Without `BoundedHttpProtocol` the server in front does so when the application returns.

    Args:
        scope: Of the request.
    """
    if incomplete := scope.get("extensions", {}).get(_INCOMPLETE):
        incomplete["close"]()


class PingedWebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol, which drops the connection of a client that answers no ping.

    uvicorn itself closes the connection once the client has read all that was sent, which a client
    that is gone never does. Its streams would continue until then.
    """

    def keepalive_timeout(self) -> None:
        """Called when a ping was not answered in time."""
        self.transport.abort()
