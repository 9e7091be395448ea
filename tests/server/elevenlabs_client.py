"""A client of ElevenLabs' WebSockets, and what it makes of their messages."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import websockets
from numpy.typing import NDArray

from tests.fakes import TIMEOUT_S
from tests.server.running import RunningServer

PCM = {"output_format": "pcm_24000"}

T = TypeVar("T")


class Client:
    """A client of either WebSocket."""

    def __init__(self, websocket: websockets.ClientConnection) -> None:
        self.websocket = websocket

    async def send(self, **message: Any) -> None:
        await self.websocket.send(json.dumps(message))

    async def say(self, context_id: str, text: str, **settings: Any) -> None:
        """Sends a whole turn, as Pipecat does; settings are of its first message."""
        await self.send(text=" ", context_id=context_id, **settings)
        await self.send(text=text, context_id=context_id)
        await self.send(context_id=context_id, flush=True)
        await self.send(context_id=context_id, close_context=True)

    async def receive(self) -> dict[str, Any]:
        return json.loads(await asyncio.wait_for(self.websocket.recv(), TIMEOUT_S))

    async def until_final(self, context_id: str | None = None) -> list[dict[str, Any]]:
        """The messages of a context up to the last one; those of others are dropped."""
        messages: list[dict[str, Any]] = []
        while not messages or not messages[-1]["isFinal"]:
            message = await self.receive()
            if message.get("contextId") == context_id:
                messages.append(message)
        return messages

    async def close_frame(self) -> tuple[int, str]:
        """Reads until the server closes the connection."""
        with suppress(websockets.ConnectionClosedError):
            async with asyncio.timeout(TIMEOUT_S):
                async for _ in self.websocket:
                    pass
        return self.websocket.close_code or 0, self.websocket.close_reason or ""


@asynccontextmanager
async def connected(
    server: RunningServer, path: str = "multi-stream-input", voice: str = "ryan", **query: str
) -> AsyncIterator[Client]:
    parameters = "&".join(f"{name}={value}" for name, value in (PCM | query).items())
    url = f"ws://{server.authority}/v1/text-to-speech/{voice}/{path}?{parameters}"
    async with websockets.connect(url) as websocket:
        yield Client(websocket)


def converse(
    server: RunningServer,
    act: Callable[[Client], Awaitable[T]],
    path: str = "multi-stream-input",
    **query: str,
) -> T:
    """Runs a conversation over one connection."""

    async def run() -> T:
        async with connected(server, path, **query) as client:
            return await act(client)

    return asyncio.run(run())


def pcm_of(messages: list[dict[str, Any]]) -> NDArray[np.int16]:
    audio = [base64.b64decode(m["audio"]) for m in messages if m.get("audio")]
    return np.frombuffer(b"".join(audio), "<i2")


def characters_of(
    messages: list[dict[str, Any]], *, synchronous: bool = False
) -> list[tuple[str, int]]:
    """Characters and their starts in ms from the start of the context.

    Times are relative to a message unless they are synchronous. Messages last as long as their
    characters.
    """
    characters: list[tuple[str, int]] = []
    message_ms = 0
    for message in messages:
        if (alignment := message.get("alignment")) is None:
            continue
        assert alignment == message["normalizedAlignment"]
        starts, durations = alignment["charStartTimesMs"], alignment["charDurationsMs"]
        times = [(0 if synchronous else message_ms) + start for start in starts]
        characters += zip(alignment["chars"], times, strict=True)
        message_ms += starts[-1] + durations[-1]
    return characters


def words_of(characters: list[tuple[str, int]]) -> list[tuple[str, float]]:
    """The words between spaces, and their starts in seconds."""
    words: list[tuple[str, float]] = []
    before = " "
    for character, start_ms in characters:
        if character != " " and before == " ":
            words.append(("", start_ms / 1000))
        if character != " ":
            words[-1] = (words[-1][0] + character, words[-1][1])
        before = character
    return words
