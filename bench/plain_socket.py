"""A client of a WebSocket that costs little time itself, for measurements of a server."""

import asyncio
import base64
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

_MASKED = 0x80  # a bit of the second byte of a client's frame
_FINAL = 0x80  # a bit of the first byte of the last frame of a message
_NO_MASK = bytes(4)  # a mask that leaves the content as it is
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10


class PlainSocket:
    """One connection to a server that sends each message in one frame.

    It frames messages on asyncio's streams. A client library would parse headers and keep queues,
    tasks and timers, whose time would be measured with the server's.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes over a connection after the handshake; `connect` calls it."""
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def connect(cls, host: str, port: int, path: str) -> AsyncGenerator["PlainSocket"]:
        """Opens a connection, which the end of the block closes.

        Args:
            host: Of the server.
            port: Of the server.
            path: Of the WebSocket.

        Raises:
            ConnectionError: The server refuses the handshake.
        """
        reader, writer = await asyncio.open_connection(host, port)
        try:
            key = base64.b64encode(os.urandom(16)).decode()
            lines = (
                f"GET {path} HTTP/1.1",
                f"Host: {host}:{port}",
                "Connection: Upgrade",
                "Upgrade: websocket",
                "Sec-WebSocket-Version: 13",
                f"Sec-WebSocket-Key: {key}",
            )
            writer.write("\r\n".join((*lines, "", "")).encode())
            status, _, _ = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            if status.split()[1] != b"101":
                raise ConnectionError(f"No WebSocket at {path}: {status.decode()}.")
            yield cls(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):  # the server may have closed it
                await writer.wait_closed()

    def send(self, text: bytes) -> None:
        """Sends a message of text in UTF-8, of less than 64 KiB."""
        self._send_frame(_TEXT, text)

    async def receive(self) -> bytes:
        """Receives the next message; answers the server's pings before it.

        A server closes the connection of a client that does not answer, so do not leave it unread.

        Raises:
            ConnectionError: The server closes the connection.
        """
        while True:
            first, size = await self._reader.readexactly(2)
            if size >= 126:
                size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8))
            content = await self._reader.readexactly(size)
            opcode = first & 0xF
            if opcode == _CLOSE:
                raise ConnectionError(f"The server closes the WebSocket: {content!r}.")
            if opcode != _PING:
                return content
            self._send_frame(_PONG, content)

    def _send_frame(self, opcode: int, content: bytes) -> None:
        size = len(content)
        long = size >= 126
        head = bytes((_FINAL | opcode, _MASKED | (126 if long else size)))
        self._writer.write(head + (size.to_bytes(2) if long else b"") + _NO_MASK + content)
