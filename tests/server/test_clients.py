"""What holds for every client: invalid keys are reported, and what it does not hear is stopped."""

import asyncio
import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, cast

import httpx
import numpy as np
import pytest
import websockets
from cartesia import AsyncCartesia, Cartesia
from cartesia import AuthenticationError as CartesiaAuthenticationError
from elevenlabs.client import ElevenLabs
from livekit.plugins import openai as livekit_openai
from openai import AuthenticationError, OpenAI
from websockets.typing import Subprotocol

from megakernel_tts import TTS, LivePolicy
from tests.server.running import LOCKED, TEXT, RunningServer, running_server, until, wait_until

LONG_TEXT = "A long text that is cancelled. " * 400
OUTPUT: Any = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24_000}


def openai_client(server: RunningServer) -> None:
    with (
        OpenAI(api_key="other", base_url=f"{server.url}/v1") as client,
        pytest.raises(AuthenticationError, match="API key"),
    ):
        client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT)


def cartesia_client(server: RunningServer) -> None:
    with (
        Cartesia(api_key="other", base_url=server.url) as client,
        pytest.raises(CartesiaAuthenticationError, match="API key"),
    ):
        client.tts.generate(
            model_id="sonic-3",
            transcript=TEXT,
            voice={"mode": "id", "id": "ryan"},
            output_format=OUTPUT,
        )


def cartesia_socket_client(server: RunningServer) -> None:
    async def connect() -> None:
        url = f"ws://{server.authority}"
        async with AsyncCartesia(
            api_key="other", base_url=server.url, websocket_base_url=url
        ) as client:
            with pytest.raises(websockets.InvalidStatus, match="401"):
                async with client.tts.websocket_connect():
                    pass

    asyncio.run(connect())


def curl(server: RunningServer) -> None:
    if (program := shutil.which("curl")) is None:
        pytest.skip("no curl")
    url, body = f"{server.url}/v1/audio/speech", json.dumps({"input": TEXT})
    command = [program, "--silent", "--fail-with-body", "-H", "X-API-Key: other", url, "-d", body]
    run = subprocess.run(command, capture_output=True, check=False)
    assert run.returncode == 22  # of an HTTP error
    assert json.loads(run.stdout)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("use", [openai_client, cartesia_client, cartesia_socket_client, curl])
def test_a_client_reports_an_invalid_key(engine: TTS, use: Callable[[RunningServer], None]) -> None:
    with running_server(engine, LOCKED) as server:
        use(server)
        assert server.num_streams == 0


def cancelling_cartesia(server: RunningServer) -> None:
    asyncio.run(speak_with_cartesia(server, cancel=True))


def disconnecting_cartesia(server: RunningServer) -> None:
    asyncio.run(speak_with_cartesia(server, cancel=False))


async def speak_with_cartesia(server: RunningServer, *, cancel: bool) -> None:
    """Reads some of a context, and cancels it or closes the connection."""
    client = AsyncCartesia(
        api_key="none", base_url=server.url, websocket_base_url=f"ws://{server.authority}"
    )
    async with client, client.tts.websocket_connect() as connection:
        context = connection.context(
            model_id="sonic-3", voice={"mode": "id", "id": "ryan"}, output_format=OUTPUT
        )
        await context.push(LONG_TEXT)
        await context.no_more_inputs()
        async for event in context.receive():
            if event.type == "chunk":
                break
        if cancel:
            await context.cancel()
            await until(lambda: server.num_streams == 0)
            assert server.metric("websocket_connections") == 1


def disconnecting_elevenlabs(server: RunningServer) -> None:
    with httpx.Client() as http:
        client = ElevenLabs(api_key="none", base_url=server.url, httpx_client=http)
        audio = client.text_to_speech.stream("ryan", text=LONG_TEXT, output_format="pcm_24000")
        with closing(cast(Generator[bytes], audio)):
            assert next(iter(audio))


def disconnecting_elevenlabs_socket(server: RunningServer) -> None:
    client = ElevenLabs(api_key="none", base_url=server.url)
    client.text_to_speech._ws_base_url = f"ws://{server.authority}"
    audio = client.text_to_speech.convert_realtime(
        "ryan", text=iter([LONG_TEXT]), output_format="pcm_24000"
    )
    with closing(cast(Generator[bytes], audio)):
        assert next(iter(audio))


def disconnecting_openai(server: RunningServer) -> None:
    with OpenAI(api_key="none", base_url=f"{server.url}/v1") as client:
        speech = client.audio.speech.with_streaming_response
        with speech.create(model="tts-1", voice="alloy", input=LONG_TEXT) as reply:
            assert next(reply.iter_bytes())


def disconnecting_livekit(server: RunningServer) -> None:
    async def speak() -> None:
        url = f"{server.url}/v1"
        async with livekit_openai.TTS(api_key="none", base_url=url, response_format="pcm") as tts:
            async with tts.synthesize(LONG_TEXT) as stream:
                await anext(stream)

    asyncio.run(speak())


def disconnecting_curl(server: RunningServer) -> None:
    if (program := shutil.which("curl")) is None:
        pytest.skip("no curl")
    url, body = f"{server.url}/v1/audio/speech", json.dumps({"input": LONG_TEXT})
    command = [program, "--silent", "--no-buffer", url, "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.kill()


@pytest.mark.parametrize(
    "speak",
    [
        cancelling_cartesia,
        disconnecting_cartesia,
        disconnecting_elevenlabs,
        disconnecting_elevenlabs_socket,
        disconnecting_openai,
        disconnecting_livekit,
        disconnecting_curl,
    ],
)
def test_a_client_that_stops_within_its_speech_stops_the_stream(
    engine: TTS, speak: Callable[[RunningServer], None]
) -> None:
    with running_server(engine) as server:
        speak(server)
        wait_until(lambda: server.num_streams == 0)
        assert server.metric('requests_success_total{finished_reason="abort"}') == 1


SILENT_CLIENTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "elevenlabs multi": (
        "/v1/text-to-speech/ryan/multi-stream-input?output_format=pcm_48000",
        [{"text": LONG_TEXT, "context_id": "a"}, {"context_id": "a", "flush": True}],
    ),
    "elevenlabs": (
        "/v1/text-to-speech/ryan/stream-input?output_format=pcm_48000",
        [{"text": LONG_TEXT}, {"text": ""}],
    ),
    "nari": (
        "/v1/audio/speech/ws",
        [
            {"type": "request.start", "voice": "ryan", "response_format": "pcm"},
            {"type": "input_text.append", "sequence": 0, "text": LONG_TEXT},
            {"type": "input_text.end", "sequence": 1},
        ],
    ),
}


@pytest.mark.parametrize("protocol", SILENT_CLIENTS)
def test_a_client_that_does_not_read_neither_delays_others_nor_stays(
    engine: TTS, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setattr("megakernel_tts.server.playback.MAX_BEHIND_S", 0.3)
    policy = LivePolicy(max_lead_s=1e9)  # is sent as fast as the client reads
    monkeypatch.setattr("megakernel_tts.server.speech_stream._LIVE", policy)
    path, messages = SILENT_CLIENTS[protocol]
    subprotocols = [Subprotocol("nari.speech.v1")] if protocol == "nari" else None

    async def act(server: RunningServer) -> None:
        host, port = server.authority.split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.connect((host, int(port)))
        async with websockets.connect(
            f"ws://{server.authority}{path}",
            sock=connection,
            max_queue=1,
            subprotocols=subprotocols,
        ) as silent:
            for message in messages:
                await silent.send(json.dumps(message))
            await until(lambda: server.metric("num_requests_running") == 1)
            body = {"input": TEXT, "response_format": "pcm"}
            async with httpx.AsyncClient() as client:
                reply = await client.post(f"{server.url}/v1/audio/speech", json=body)
            assert np.array_equal(np.frombuffer(reply.content, "<i2"), server.speech())
            await until(lambda: server.num_streams == 0)
            await until(lambda: server.metric("websocket_connections") == 0)
            silent.transport.abort()

    with running_server(engine) as server:
        asyncio.run(act(server))
        assert server.metric('requests_success_total{finished_reason="abort"}') == 1
