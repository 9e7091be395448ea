"""However a client stops, the engine makes no frame of its streams after the one under way."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from bench.cartesia import cartesia_message
from megakernel_tts import TTS
from megakernel_tts.server.speech_stream import SpeechStream
from tests.server.running import TEXT, wait_until
from tests.server.wyoming_client import WyomingServer, serving

LONG_TEXT = TEXT * 200
NUM_STREAMS = 3

Message = dict[str, Any]
Stop = Callable[[], None]
Speak = Callable[[WyomingServer], AbstractContextManager[Stop]]


class StepLock:
    """Holds the engine at the start of a frame.

    Attributes:
        num_begun: Frames that the engine has begun, the held one included.
    """

    def __init__(self, backend: Any) -> None:
        self.num_begun = 0
        self._num_made = 0
        self._step = backend.step
        self._lock = threading.Lock()

    def step(self, *arguments: Any, **keywords: Any) -> Any:
        """Replaces the backend's."""
        self.num_begun += 1
        with self._lock:
            frames = self._step(*arguments, **keywords)
            self._num_made += 1
        return frames

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the next frame until the block ends."""
        with self._lock:
            wait_until(lambda: self.num_begun > self._num_made)
            yield


def websocket(path: str, messages: list[Message], stops: list[Message]) -> Speak:
    """Speaks over a WebSocket, and stops with further messages, or by closing it."""

    @contextmanager
    def speak(server: WyomingServer) -> Iterator[Stop]:
        subprotocols = [Subprotocol("nari.speech.v1")]
        with connect(f"ws://{server.authority}{path}", subprotocols=subprotocols) as client:
            send_all(client, messages)
            yield partial(send_all, client, stops) if stops else client.close

    return speak


def send_all(client: ClientConnection, messages: list[Message]) -> None:
    for message in messages:
        client.send(json.dumps(message))


def http(path: str, body: Message) -> Speak:
    """Requests speech, and stops by disconnecting."""

    def speak(server: WyomingServer) -> AbstractContextManager[Stop]:
        data = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        return connected(server.authority, head + data)

    return speak


def wyoming(server: WyomingServer) -> AbstractContextManager[Stop]:
    """Requests speech, and stops by disconnecting."""
    event = {"type": "synthesize", "data": {"text": LONG_TEXT}}
    return connected(f"{server.host}:{server.port}", json.dumps(event) + "\n")


@contextmanager
def connected(authority: str, request: str) -> Iterator[Stop]:
    """Sends a request and reads the reply until the connection is shut down."""
    host, port = authority.split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(request.encode())
        reading = threading.Thread(target=read, args=(client,))
        reading.start()
        yield partial(client.shutdown, socket.SHUT_RDWR)
        reading.join()


def read(client: socket.socket) -> None:
    while client.recv(1 << 16):
        pass


CONTEXTS = [f"{i}" for i in range(NUM_STREAMS)]
CARTESIA = [cartesia_message(LONG_TEXT, context_id=name) for name in CONTEXTS]
NARI: list[Message] = [
    {"type": "request.start", "voice": "ryan", "response_format": "pcm"},
    {"type": "input_text.append", "sequence": 0, "text": LONG_TEXT},
]
NARI_PATH = "/v1/audio/speech/ws"
WAYS: dict[str, tuple[Speak, int]] = {
    "cartesia cancels": (
        websocket(
            "/tts/websocket", CARTESIA, [{"context_id": name, "cancel": True} for name in CONTEXTS]
        ),
        NUM_STREAMS,
    ),
    "cartesia closes": (websocket("/tts/websocket", CARTESIA, []), NUM_STREAMS),
    "elevenlabs closes": (
        websocket(
            "/v1/text-to-speech/ryan/multi-stream-input?output_format=pcm_24000",
            [{"text": LONG_TEXT, "context_id": name} for name in CONTEXTS],
            [],
        ),
        NUM_STREAMS,
    ),
    "nari cancels": (websocket(NARI_PATH, NARI, [{"type": "response.cancel"}]), 1),
    "nari closes": (websocket(NARI_PATH, NARI, []), 1),
    "http": (http("/v1/audio/speech", {"input": LONG_TEXT}), 1),
    "http batch": (
        http("/v1/audio/speech/batch", {"items": [{"input": LONG_TEXT}] * NUM_STREAMS}),
        NUM_STREAMS,
    ),
    "wyoming": (wyoming, 1),
}


@pytest.fixture(scope="module")
def server(engine: TTS) -> Iterator[WyomingServer]:
    with serving(engine) as server:
        yield server


@pytest.mark.parametrize("way", WAYS)
def test_no_frame_follows_the_one_under_way(
    server: WyomingServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    backend: Any = server.tts._loaded.engine.backend
    lock = StepLock(backend)
    closed = set[SpeechStream]()
    close = SpeechStream.close

    def recorded(stream: SpeechStream) -> None:
        if not stream._closed:  # streams of earlier tests may be closed again
            closed.add(stream)
        close(stream)

    monkeypatch.setattr(backend, "step", lock.step)
    monkeypatch.setattr(SpeechStream, "close", recorded)
    speak, num_streams = WAYS[way]
    with speak(server) as stop:
        wait_until(lambda: server.metric("num_requests_running") == num_streams)
        with lock.held():
            num_begun = lock.num_begun
            stop()
            wait_until(lambda: len(closed) == num_streams)
        wait_until(lambda: server.num_streams == 0)
        assert lock.num_begun == num_begun
