"""A client of Wyoming's protocol, and a server whose Wyoming socket is known."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from wyoming.audio import AudioChunk
from wyoming.client import AsyncTcpClient
from wyoming.event import Event, Eventable
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

from megakernel_tts import TTS
from megakernel_tts.server.serving import bind
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.wyoming import WyomingService
from tests.fakes import TIMEOUT_S
from tests.server.running import RunningServer, running_server

T = TypeVar("T")
Use = Callable[["Client"], Awaitable[T]]


class Client(AsyncTcpClient):
    """The official client, with shortcuts."""

    async def send(self, *events: Eventable) -> None:
        """Sends events."""
        for event in events:
            await self.write_event(event.event())

    async def event(self) -> Event:
        """The next event; fails if the connection ends."""
        event = await self.read_event()
        assert event is not None, "the connection has ended"
        return event

    async def until(self, kind: type[Eventable]) -> list[Event]:
        """The events up to the first one of a kind."""
        events = [await self.event()]
        while not kind.is_type(events[-1].type):
            events.append(await self.event())
        return events


class WyomingServer(RunningServer):
    """A server whose Wyoming socket is known."""

    host: str
    port: int

    def run(self, use: Use[T]) -> T:
        """Runs a client."""

        async def connect() -> T:
            async with asyncio.timeout(TIMEOUT_S), Client(self.host, self.port) as client:
                return await use(client)

        return asyncio.run(connect())


@contextmanager
def serving(tts: TTS, settings: ServerSettings | None = None) -> Iterator[WyomingServer]:
    """Runs a server with Wyoming's protocol on a loopback port."""
    with (
        bind("127.0.0.1", 0) as listener,
        running_server(tts, settings, WyomingService(listener)) as running,
    ):
        server = WyomingServer(running.tts, running.server, running.authority)
        server.host, server.port = listener.getsockname()
        yield server


def pcm_of(events: list[Event]) -> NDArray[np.int16]:
    """The samples of events, whose format and times are checked."""
    chunks = [AudioChunk.from_event(e) for e in events if AudioChunk.is_type(e.type)]
    num_samples = 0
    for chunk in chunks:
        assert (chunk.rate, chunk.width, chunk.channels) == (24_000, 2, 1)
        assert chunk.timestamp == round(1000 * (num_samples / chunk.rate))
        num_samples += chunk.samples
    return np.frombuffer(b"".join(chunk.audio for chunk in chunks), "<i2")


def types_of(events: list[Event]) -> list[str]:
    """The types of events, each run of equal ones once."""
    types = [event.type for event in events]
    return [kind for kind, before in zip(types, [None, *types], strict=False) if kind != before]


async def portions(client: Client, *texts: str) -> list[Event]:
    """Speaks a text that arrives in portions, as Home Assistant sends it."""
    await client.send(SynthesizeStart(SynthesizeVoice("ryan")))
    await client.send(*map(SynthesizeChunk, texts))
    await client.send(Synthesize("".join(texts), SynthesizeVoice("ryan")), SynthesizeStop())
    return await client.until(SynthesizeStopped)
