import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
import websockets
from websockets.typing import Subprotocol

from megakernel_tts import TTS
from tests.fakes import TIMEOUT_S
from tests.server.running import LOCKED, TEXT, RunningServer, running_server, until, wait_until

PROTOCOL = Subprotocol("nari.speech.v1")
AUDIO = {"encoding": "pcm_s16le", "sample_rate": 24_000, "channels": 1}
LONG_TEXT = TEXT * 500

T = TypeVar("T")


@dataclass
class Client:
    """A client that checks the order of messages as strictly as Nari's benchmark.

    Attributes:
        audio: Samples so far.
        num_chunks: Messages with audio so far.
        request_id: Of the response, once it has started.
    """

    websocket: websockets.ClientConnection
    audio: bytes = b""
    num_chunks: int = 0
    request_id: str = ""
    _acknowledged: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    async def receive(self) -> dict[str, Any]:
        """The next event; audio before it is collected."""
        while True:
            data = await asyncio.wait_for(self.websocket.recv(), TIMEOUT_S)
            if isinstance(data, str):
                return json.loads(data)
            assert self.request_id, "audio before the start of the response"
            self.audio += data
            self.num_chunks += 1

    async def send(self, kind: str, **fields: Any) -> None:
        await self.websocket.send(json.dumps({"type": kind, **fields}))

    async def start(self, **fields: Any) -> None:
        """Describes the request."""
        created = await self.receive()
        assert created == {"type": "session.created", "protocol": PROTOCOL, "audio": AUDIO}
        body = {"model": "simulated", "voice": "ryan", "language": "English"}
        await self.send("request.start", **(body | {"response_format": "pcm"} | fields))
        assert (await self.receive())["type"] == "request.configured"

    async def say(self, *portions: str) -> None:
        """Sends text, each portion once the one before was acknowledged."""
        for sequence, text in enumerate(portions):
            await self.send("input_text.append", sequence=sequence, text=text)
            await self.until_acknowledged("input_text.append", sequence)

    async def end(self, sequence: int) -> None:
        await self.send("input_text.end", sequence=sequence)
        await self.until_acknowledged("input_text.end", sequence)

    async def until_acknowledged(self, event: str, sequence: int) -> None:
        while (message := await self.receive())["type"] != "input_text.ack":
            self.start_response(message)
        assert (message["event"], message["sequence"]) == (event, sequence)

    def start_response(self, message: dict[str, Any]) -> None:
        assert (message["type"], message["audio"]) == ("response.started", AUDIO)
        assert not self.request_id, "a response starts twice"
        self.request_id = message["request_id"]

    async def until_done(self) -> str:
        """Reads to the end, and returns the reason of the end."""
        while (message := await self.receive())["type"] != "response.done":
            self.start_response(message)
        assert message["request_id"] == self.request_id or not self.request_id
        assert message["audio_chunks"] == self.num_chunks
        assert await self.close_code() == 1000
        return message["stop_reason"]

    async def close_code(self) -> int:
        with pytest.raises(websockets.ConnectionClosed):
            await asyncio.wait_for(self.websocket.recv(), TIMEOUT_S)
        return self.websocket.close_code or 0


@asynccontextmanager
async def connected(server: RunningServer, query: str = "") -> AsyncIterator[Client]:
    url = f"ws://{server.authority}/v1/audio/speech/ws{query}"
    async with websockets.connect(url, subprotocols=[PROTOCOL]) as websocket:
        assert websocket.subprotocol == PROTOCOL
        yield Client(websocket)


def converse(server: RunningServer, act: Callable[[Client], Awaitable[T]]) -> T:
    """Runs a conversation over one connection."""

    async def run() -> T:
        async with connected(server) as client:
            return await act(client)

    return asyncio.run(run())


def test_audio_is_that_of_the_engine(server: RunningServer) -> None:
    async def act(client: Client) -> bytes:
        await client.start()
        await client.say("Hello ", "there, ", "my ", "friend.")
        await client.end(4)
        assert await client.until_done() == "stop"
        return client.audio

    assert np.array_equal(np.frombuffer(converse(server, act), "<i2"), server.speech())


def test_text_is_spoken_before_its_end(server: RunningServer) -> None:
    async def act(client: Client) -> None:
        await client.start()
        await client.say("Hello ", "there, ")
        while not client.request_id:
            client.start_response(await client.receive())

    converse(server, act)
    wait_until(lambda: server.num_streams == 0)


def test_a_text_without_words_is_done_at_once(server: RunningServer) -> None:
    async def act(client: Client) -> str:
        await client.start()
        await client.say("...")
        await client.end(1)
        return await client.until_done()

    assert converse(server, act) == "stop"


def test_a_cancellation_stops_the_speech(server: RunningServer) -> None:
    wait_until(lambda: server.num_streams == 0)
    aborted = server.metric('requests_success_total{finished_reason="abort"}')

    async def act(client: Client) -> str:
        await client.start()
        await client.say(LONG_TEXT)
        while not client.request_id:
            client.start_response(await client.receive())
        await client.send("response.cancel")
        reason = await client.until_done()
        await until(lambda: server.num_streams == 0)
        return reason

    assert converse(server, act) == "cancelled"
    assert server.metric('requests_success_total{finished_reason="abort"}') == aborted + 1


def test_closing_the_connection_stops_the_speech(server: RunningServer) -> None:
    async def act(client: Client) -> None:
        await client.start()
        await client.say(LONG_TEXT)

    converse(server, act)
    wait_until(lambda: server.num_streams == 0)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "nope"}, "model_not_found"),
        ({"voice": "nobody"}, "invalid_voice"),
        ({"language": "klingon"}, "invalid_language"),
        ({"response_format": "mp3"}, "invalid_value"),
        ({"temperature": -1}, "invalid_sampling"),
    ],
)
def test_an_invalid_request_is_refused(
    server: RunningServer, fields: dict[str, Any], code: str
) -> None:
    async def act(client: Client) -> None:
        await client.receive()
        await client.send("request.start", **fields)
        error = await client.receive()
        assert (error["type"], error["error"]["code"]) == ("error", code)
        assert error["request_id"] and error["error"]["message"]
        assert await client.close_code() == 1008

    converse(server, act)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"type": "input_text.append", "sequence": 1, "text": "b"}, "invalid_sequence"),
        ({"type": "input_text.append", "text": "b"}, "invalid_sequence"),
        ({"type": "input_text.append", "sequence": 0}, "invalid_value"),
        ({"type": "request.start"}, "invalid_request"),
        ({"type": "session.update"}, "unknown_event"),
        ([], "invalid_json"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_an_invalid_message_ends_the_connection(
    server: RunningServer, message: object, code: str
) -> None:
    async def act(client: Client) -> None:
        await client.start()
        await client.websocket.send(json.dumps(message))
        assert (await client.receive())["error"]["code"] == code
        assert await client.close_code() == 1008

    converse(server, act)


def test_text_before_the_request_is_an_error(server: RunningServer) -> None:
    async def act(client: Client) -> str:
        await client.receive()
        await client.send("input_text.end", sequence=0)
        return (await client.receive())["error"]["code"]

    assert converse(server, act) == "invalid_request"


def test_a_failure_is_an_error_of_the_server(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.tts._loaded.engine.backend, "failing_word", "Failing")

    async def act(client: Client) -> None:
        await client.start()
        await client.send("input_text.append", sequence=0, text="Failing. Now.")
        while (message := await client.receive())["type"] != "error":
            pass
        assert message["error"]["type"] == "server_error"
        assert await client.close_code() == 1011

    converse(server, act)


def test_a_client_without_the_subprotocol_is_refused(server: RunningServer) -> None:
    async def act() -> int | None:
        url = f"ws://{server.authority}/v1/audio/speech/ws"
        async with websockets.connect(url) as websocket:
            with pytest.raises(websockets.ConnectionClosed):
                await websocket.recv()
            return websocket.close_code

    assert asyncio.run(act()) == 1002


def test_an_invalid_key_is_refused_at_the_handshake(engine: TTS) -> None:
    async def act(server: RunningServer) -> None:
        with pytest.raises(websockets.InvalidStatus):
            async with connected(server):
                pass
        async with connected(server, "?api_key=secret") as client:
            await client.start()

    with running_server(engine, LOCKED) as server:
        asyncio.run(act(server))
