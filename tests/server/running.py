"""A server on a loopback port, in a thread of this process, and its clients."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import numpy as np
import websockets
from numpy.typing import NDArray

from bench.cartesia import cartesia_message
from bench.running_server import served, wait_until
from megakernel_tts import TTS
from megakernel_tts.server.app import Server
from megakernel_tts.server.keys import ApiKey
from megakernel_tts.server.serving import Certificate
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.tracing import Tracing
from megakernel_tts.server.wyoming import WyomingService
from tests.fakes import TIMEOUT_S

TEXT = "Hello there, my friend."

T = TypeVar("T")


def locked_by(key: str) -> ServerSettings:
    """Settings of a server that needs a key."""
    return ServerSettings(api_keys=(ApiKey(name="test", key=key),))


LOCKED = locked_by("secret")


@dataclass
class RunningServer:
    """A server that runs.

    Attributes:
        tts: Its engine.
        server: The application.
        authority: Host and port.
    """

    tts: TTS
    server: Server
    authority: str

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{self.authority}"

    @property
    def socket_url(self) -> str:
        """The URL of Cartesia's WebSocket."""
        return f"ws://{self.authority}/tts/websocket"

    @property
    def num_streams(self) -> int:
        """Streams that the server has not released."""
        return self.server.streams.num_open

    def speech(self, text: str = TEXT) -> NDArray[np.int16]:
        """What the engine itself says."""
        return self.tts.say(text).pcm

    def metric(self, name: str) -> float:
        """The value of a metric, whose labels besides the model's may follow the name."""
        start = f"megakernel_tts:{name.partition('{')[0]}{{"
        for line in self.server.streams.metrics.text().splitlines():
            if line.startswith(start) and name.partition("{")[2].rstrip("}") in line:
                return float(line.rpartition(" ")[2])
        return 0.0


@contextmanager
def running_server(
    tts: TTS,
    settings: ServerSettings | None = None,
    wyoming: WyomingService | None = None,
    tracing: Tracing | None = None,
    certificate: Certificate | None = None,
) -> Iterator[RunningServer]:
    """Runs a server until the block ends."""
    server = Server(tts, settings, wyoming, tracing)
    with served(server, certificate) as authority:
        yield RunningServer(tts, server, authority)


def is_stopping(url: str) -> bool:
    """Whether the server at a URL refuses new streams, or has stopped."""
    try:
        return "stopping" in httpx.get(f"{url}/ready").text
    except httpx.TransportError:
        return True


async def until(condition: Callable[[], bool]) -> None:
    """As `wait_until`, in an event loop."""
    await asyncio.to_thread(wait_until, condition)


class Client:
    """A client of Cartesia's WebSocket that checks each event as strictly as Pipecat's."""

    def __init__(self, websocket: websockets.ClientConnection) -> None:
        self.websocket = websocket

    async def send(self, context_id: str, text: str, **fields: Any) -> None:
        """Sends a message of a context."""
        message = cartesia_message(text, context_id=context_id, **fields)
        await self.websocket.send(json.dumps(message))

    async def cancel(self, context_id: str) -> None:
        """Cancels a context."""
        await self.websocket.send(json.dumps({"context_id": context_id, "cancel": True}))

    async def receive(self) -> dict[str, Any]:
        """The next event."""
        event = json.loads(await asyncio.wait_for(self.websocket.recv(), TIMEOUT_S))
        assert event["context_id"] is not None
        assert event["type"] in ("chunk", "timestamps", "flush_done", "done", "error")
        assert event["done"] is (event["type"] == "done")
        assert event["type"] != "chunk" or event["data"]
        return event

    async def until_done(self, context_id: str) -> list[dict[str, Any]]:
        """The events of a context up to its end; those of others are dropped."""
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] not in ("done", "error"):
            event = await self.receive()
            if event["context_id"] == context_id:
                events.append(event)
        return events


@asynccontextmanager
async def connected(server: RunningServer, **keywords: Any) -> AsyncIterator[Client]:
    """A connection to Cartesia's WebSocket."""
    async with websockets.connect(server.socket_url, **keywords) as websocket:
        yield Client(websocket)


def converse(server: RunningServer, act: Callable[[Client], Awaitable[T]]) -> T:
    """Runs a conversation over one connection."""

    async def run() -> T:
        async with connected(server) as client:
            return await act(client)

    return asyncio.run(run())


def audio_of(events: list[dict[str, Any]]) -> bytes:
    """The audio of events."""
    return b"".join(base64.b64decode(e["data"]) for e in events if e["type"] == "chunk")


def pcm_of(events: list[dict[str, Any]]) -> NDArray[np.int16]:
    """The samples of events with 16-bit audio."""
    return np.frombuffer(audio_of(events), "<i2")


def words_of(events: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """The words of events and their starts."""
    times = [event["word_timestamps"] for event in events if event["type"] == "timestamps"]
    return [pair for time in times for pair in zip(time["words"], time["start"], strict=True)]
