"""Wyoming's protocol over TCP, which Home Assistant speaks, and its announcement by zeroconf."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from megakernel_tts.server.fields import MAX_TEXT_CHARACTERS
from megakernel_tts.server.serving import authority
from megakernel_tts.server.streams import SpeechStreams
from megakernel_tts.server.wyoming_connection import WyomingConnection

_log = logging.getLogger("megakernel_tts.server")

_MAX_PART_BYTES = 4 * MAX_TEXT_CHARACTERS  # of an event: its line, its data, its payload
_SERVICE_TYPE = "_wyoming._tcp.local."
_MULTICAST_DNS = ("224.0.0.251", 5353)


class WyomingService:
    """Serves Wyoming's clients on a socket of its own.

    Attributes:
        url: Its address.
    """

    def __init__(self, listener: socket.socket, zeroconf_name: str | None = None) -> None:
        """Prepares the service.

        Args:
            listener: A listening socket, whose owner closes it.
            zeroconf_name: Name under which the service is announced in the local network; None
                for no announcement.

        Raises:
            ValueError: The name is no name of a service.
            OSError: It is to be announced, and this machine has no network.
        """
        self.url = f"tcp://{authority(listener)}"
        self._listener = listener
        self._announcement = None if zeroconf_name is None else _service(listener, zeroconf_name)

    @asynccontextmanager
    async def serving(self, streams: SpeechStreams) -> AsyncGenerator[None]:
        """Accepts connections until the block ends, which closes them.

        Args:
            streams: The streams of the server.
        """
        connections: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(connections) >= streams.settings.max_connections:
                writer.close()
                return
            connection = asyncio.create_task(WyomingConnection(reader, writer, streams).run())
            connections.add(connection)
            connection.add_done_callback(connections.discard)

        def make_protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(_BoundedReader(limit=_MAX_PART_BYTES), accept)

        loop = asyncio.get_running_loop()
        server = await loop.create_server(make_protocol, sock=self._listener)
        try:
            async with _announced(self._announcement):
                yield
        finally:
            server.close()
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)


class _BoundedReader(asyncio.StreamReader):
    """Refuses long parts; `async_read_event` would collect them in memory."""

    async def readexactly(self, n: int) -> bytes:
        """Reads `n` bytes.

        Raises:
            ValueError: There are too many, which ends the connection.
        """
        if n > _MAX_PART_BYTES:
            raise ValueError(f"a part of an event has {n} bytes")
        return await super().readexactly(n)


def _service(listener: socket.socket, name: str) -> AsyncServiceInfo:
    """The announcement of a socket."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_MULTICAST_DNS)  # sends nothing, but selects this machine's address
            host = probe.getsockname()[0]
    try:
        return AsyncServiceInfo(
            _SERVICE_TYPE, f"{name}.{_SERVICE_TYPE}", port, parsed_addresses=[host]
        )
    except ZeroconfError as error:
        raise ValueError(f"{name!r} is no name for zeroconf ({error}).") from None


@asynccontextmanager
async def _announced(service: AsyncServiceInfo | None) -> AsyncGenerator[None]:
    """Announces a service until the block ends, if the network permits it."""
    if service is None:
        yield
        return
    zeroconf: AsyncZeroconf | None = None
    try:
        zeroconf = AsyncZeroconf()
        await zeroconf.async_register_service(service, allow_name_change=True)
    except (OSError, ZeroconfError) as error:
        _log.error("Wyoming's address is not announced: %s", error)
    try:
        yield
    finally:
        if zeroconf is not None:
            await zeroconf.async_close()
