"""A server in the event loop of its client, so that both run in virtual time.

They are connected by Unix sockets. These deliver at once, so that no data is on its way while the
virtual clock advances.
"""

import asyncio
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from unittest.mock import patch

import aiohttp
import uvicorn

from megakernel_tts import TTS
from megakernel_tts.server.app import Server
from megakernel_tts.server.playback import PlaybackClock
from megakernel_tts.server.serving import uvicorn_config
from megakernel_tts.server.settings import ServerSettings
from pipecat_service.pace import loop_time_s

URL = "http://localhost"  # of the server of the running task

_PATH: ContextVar[str] = ContextVar("path")  # of its socket


class LoopServer(uvicorn.Server):
    """A server that leaves signals to the tests, and that can fail.

    Attributes:
        application: The application.
    """

    def __init__(self, application: Server) -> None:
        super().__init__(uvicorn_config(application))
        self.application = application

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles no signal; called by uvicorn."""
        yield

    def abort(self) -> None:
        """Ends all connections, as if the process had ended."""
        for connection in self.server_state.connections:
            connection.transport.abort()


@contextmanager
def local_sockets() -> Iterator[None]:
    """Clients connect to the server of the running task, whose pace is the event loop's time."""

    def connector(**_: object) -> aiohttp.UnixConnector:
        return aiohttp.UnixConnector(_PATH.get())

    paced = partial(PlaybackClock, loop_time_s)
    with (
        patch("aiohttp.TCPConnector", connector),
        patch("megakernel_tts.server.speech_stream.PlaybackClock", paced),
    ):
        yield


@asynccontextmanager
async def serving(
    tts: TTS, settings: ServerSettings | None = None, path: Path | None = None
) -> AsyncIterator[LoopServer]:
    """Serves the running task and the tasks that it creates meanwhile.

    Args:
        tts: The engine.
        settings: Of the server.
        path: Of its socket, for a server that replaces another one; None for a new one.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = path or Path(folder) / "socket"
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        with connecting_to(path):
            server = LoopServer(Server(tts, settings))
            running = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
                    await asyncio.sleep(0)
                yield server
            finally:
                server.should_exit = True
                await running


@contextmanager
def connecting_to(path: Path) -> Iterator[None]:
    """Has the clients of the running task connect to a socket."""
    token = _PATH.set(str(path))
    try:
        yield
    finally:
        _PATH.reset(token)


@asynccontextmanager
async def stalling_proxy(rng: random.Random, share: float) -> AsyncIterator[None]:
    """Connects the clients of the running task to its server through a network that stalls.

    Args:
        rng: Determines the stalls, of up to two seconds.
        share: Share of the server's messages that are late, and all later ones with them.
    """
    target = _PATH.get()

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
        target.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(target)
        sending = asyncio.create_task(forward(reader, to_server))
        while data := await from_server.read(1 << 16):
            if rng.random() < share:
                await asyncio.sleep(rng.uniform(0, 2))
            writer.write(data)
        writer.close()
        await sending

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        async with await asyncio.start_unix_server(connect, path):
            with connecting_to(path):
                yield
