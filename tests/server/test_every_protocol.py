"""What holds in every protocol: keys, priorities, the pace, and refusals of new streams."""

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol
from wyoming.event import Event, Eventable
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart

from bench.cartesia import cartesia_message
from megakernel_tts import TTS, ChunkPolicy, LivePolicy, Session
from megakernel_tts.server.keys import Priority
from megakernel_tts.server.reports import SpeechReport
from megakernel_tts.server.speech_stream import SpeechRequest, SpeechStream
from megakernel_tts.server.streams import SpeechStreams
from tests.fakes import TIMEOUT_S
from tests.server.running import LOCKED, TEXT, RunningServer, running_server, wait_until
from tests.server.wyoming_client import Client, serving

ELEVENLABS = "/v1/text-to-speech/ryan{}?output_format=pcm_24000&api_key=secret"
START = {"type": "request.start", "voice": "ryan", "response_format": "pcm"}
APPEND = {"type": "input_text.append", "sequence": 0, "text": TEXT}

Message = dict[str, Any]
Opened = queue.Queue[tuple[SpeechRequest, SpeechReport]]


@dataclass(frozen=True)
class Protocol:
    """How a protocol requests speech.

    Attributes:
        path: Path and query of the endpoint, with the key.
        messages: Messages of a WebSocket, or the body of a request.
        default: Priority of a request that names none.
        in_url: Whether the URL names the priority, instead of the first message.
        paced: Whether the endpoint is a WebSocket, whose audio is sent at the pace of playback.
    """

    path: str
    messages: list[Message]
    default: Priority
    in_url: bool = False
    paced: bool = False

    def speak(self, server: RunningServer, priority: Priority | None, opened: Opened) -> None:
        """Requests speech, with a priority unless it is None, and waits for its stream."""
        path, messages = self.path, self.messages
        if priority is not None:
            field = {"priority": priority.name.lower()}
            path += f"&priority={field['priority']}" if self.in_url else ""
            messages = messages if self.in_url else [messages[0] | field, *messages[1:]]
        if self.paced:
            with sent(server, path, messages):
                wait_until(lambda: not opened.empty())
        else:
            assert post(server, path, messages[0]).status_code == 200


@contextmanager
def sent(server: RunningServer, path: str, messages: list[Message]) -> Iterator[ClientConnection]:
    """A WebSocket over which messages were sent."""
    url = f"ws://{server.authority}{path}"
    with connect(url, subprotocols=[Subprotocol("nari.speech.v1")]) as websocket:
        for message in messages:
            websocket.send(json.dumps(message))
        yield websocket


def post(server: RunningServer, path: str, body: Message) -> httpx.Response:
    return httpx.post(server.url + path, json=body)


PROTOCOLS = {
    "openai": Protocol("/v1/audio/speech?api_key=secret", [{"input": TEXT}], Priority.PREFETCH),
    "openai batch": Protocol(
        "/v1/audio/speech/batch?api_key=secret", [{"items": [{"input": TEXT}]}], Priority.BATCH
    ),
    "cartesia": Protocol("/tts/bytes?api_key=secret", [{"transcript": TEXT}], Priority.PREFETCH),
    "cartesia socket": Protocol(
        "/tts/websocket?api_key=secret",
        [cartesia_message(TEXT, context_id="a")],
        Priority.LIVE,
        paced=True,
    ),
    "elevenlabs": Protocol(ELEVENLABS.format(""), [{"text": TEXT}], Priority.PREFETCH, in_url=True),
    "elevenlabs socket": Protocol(
        ELEVENLABS.format("/stream-input"), [{"text": TEXT}], Priority.LIVE, in_url=True, paced=True
    ),
    "elevenlabs contexts": Protocol(
        ELEVENLABS.format("/multi-stream-input"),
        [{"text": TEXT, "context_id": "a"}],
        Priority.LIVE,
        in_url=True,
        paced=True,
    ),
    "nari": Protocol(
        "/v1/audio/speech/ws?api_key=secret", [START, APPEND], Priority.LIVE, paced=True
    ),
    "vapi": Protocol(
        "/vapi/voice?api_key=secret",
        [{"message": {"type": "voice-request", "text": TEXT}}],
        Priority.LIVE,
        in_url=True,
    ),
}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The streams that servers open."""
    opened = Opened()
    open_admitted = SpeechStreams._open_admitted

    async def recorded(
        streams: SpeechStreams, request: SpeechRequest, report: SpeechReport
    ) -> SpeechStream:
        opened.put((request, report))
        return await open_admitted(streams, request, report)

    monkeypatch.setattr(SpeechStreams, "_open_admitted", recorded)
    return opened


@pytest.fixture(scope="module")
def locked(engine: TTS) -> Iterator[RunningServer]:
    with running_server(engine, LOCKED) as server:
        yield server


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_speech_has_the_key_of_its_request_and_the_priority_of_its_protocol(
    locked: RunningServer, opened: Opened, name: str, named: bool
) -> None:
    protocol = PROTOCOLS[name]
    other = Priority.PREFETCH if protocol.default is Priority.BATCH else Priority.BATCH
    protocol.speak(locked, other if named else None, opened)
    request, report = opened.get(timeout=TIMEOUT_S)
    assert report.priority is (other if named else protocol.default)
    assert report.caller.account.name == "test"
    assert request.paced is protocol.paced


@pytest.mark.parametrize("name", PROTOCOLS)
def test_requests_of_openais_api_alone_select_the_layout(
    locked: RunningServer, opened: Opened, name: str
) -> None:
    protocol = PROTOCOLS[name]
    first, *others = protocol.messages
    messages = [first | {"non_streaming_mode": False}, *others]
    replace(protocol, messages=messages).speak(locked, None, opened)
    request, _ = opened.get(timeout=TIMEOUT_S)
    assert request.layout == ("streaming" if name.startswith("openai") else "auto")


@pytest.mark.parametrize("name", ["openai", "cartesia socket"])
def test_audio_that_is_not_paced_is_made_in_larger_chunks(
    locked: RunningServer, opened: Opened, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    policies, aopen = queue.Queue[ChunkPolicy](), locked.tts.aopen

    async def recorded(*arguments: Any, chunks: ChunkPolicy, **keywords: Any) -> Session:
        policies.put(chunks)
        return await aopen(*arguments, chunks=chunks, **keywords)

    monkeypatch.setattr(locked.tts, "aopen", recorded)
    protocol, live = PROTOCOLS[name], LivePolicy().chunks
    protocol.speak(locked, None, opened)
    policy = policies.get(timeout=TIMEOUT_S)
    assert policy.first == live.first == 1
    assert (policy == live) is protocol.paced
    assert (policy.largest > live.largest) is not protocol.paced


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_stopping_server_refuses_speech_at_once(engine: TTS, name: str) -> None:
    protocol = PROTOCOLS[name]
    with running_server(engine, LOCKED) as server:
        server.server.streams.draining = True
        if protocol.paced:
            with sent(server, protocol.path, protocol.messages) as websocket:
                while "draining" not in str(websocket.recv(TIMEOUT_S)):
                    pass
        else:
            reply = post(server, protocol.path, protocol.messages[0])
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
            assert "stopping" in reply.text
        assert server.metric('rejected_requests_total{reason="draining",key="test"}') == 1


@pytest.mark.parametrize(
    ("events", "paced"),
    [([Synthesize(TEXT)], False), ([SynthesizeStart(), SynthesizeChunk(TEXT)], True)],
    ids=["whole text", "portions"],
)
def test_speech_of_wyoming_is_live(
    engine: TTS, opened: Opened, events: list[Eventable], paced: bool
) -> None:
    async def use(client: Client) -> Event:
        await client.send(*events)
        return await client.event()

    with serving(engine) as server:
        assert server.run(use).type == "audio-start"
        request, report = opened.get(timeout=TIMEOUT_S)
        assert (report.priority, request.paced) == (Priority.LIVE, paced)
