"""A socket between the front and an engine process, which carries messages both ways."""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from megakernel_tts.server.cluster.messages import Message, encode, take


class Channel(asyncio.Protocol):
    """One end of a socket. All methods are called on its event loop.

    Invalid content closes the channel.
    """

    def __init__(
        self, on_message: Callable[[Message], None], on_closed: Callable[[], None]
    ) -> None:
        """Starts without a connection; messages that are sent meanwhile are dropped.

        Args:
            on_message: Receives each message.
            on_closed: Called once after the last message: either end was closed, or the other
                process has ended.
        """
        self._on_message = on_message
        self._on_closed = on_closed
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    async def connect(self, end: socket.socket) -> None:
        """Takes over one end of a socket pair."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: Message) -> None:
        """Sends a message; without effect on a closed channel. Never waits."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def close(self) -> None:
        """Sends what was not sent, then closes the channel."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes the channel at once, although the other end may not read what was sent."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received += data
        while (message := take(self._received)) is not None:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._on_closed()
