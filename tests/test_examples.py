"""The examples, run in this process and as commands, with a local endpoint for the answers."""

import asyncio
import gc
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import aiohttp
import numpy as np
import pytest
import soundfile
from livekit import rtc
from livekit.agents import Agent
from livekit.agents.voice.io import AudioOutput, AudioOutputCapabilities
from livekit.plugins import cartesia
from loguru import logger
from pipecat.frames import frames
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.tests.utils import run_test

from bench.simulation import simulated_tts, words_in_audio
from examples import livekit_agent, voice_agent
from tests.fakes import TIMEOUT_S
from tests.server.running import LOCKED, running_server

EXAMPLES = Path(__file__).parent.parent / "examples"
ANSWER = "Hello, it is good to hear from you. How are you today?"


def keyless() -> dict[str, str]:
    """The environment without keys and endpoints."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "DEEPGRAM_"))}


def run_command(name: str, folder: Path, text: str = "") -> None:
    """Runs an example as a command, which must succeed."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=folder,
        env=keyless(),
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_warm_up: None
) -> Iterator[Callable[..., None]]:
    """Runs an example in this process, in an empty folder; `text` is its standard input.

    A warm-up, which would take most of an example's time, does nothing here; commands warm up.
    """
    for variable in os.environ.keys() - keyless().keys():
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    sinks: list[int] = []  # that examples add to this process's log
    add = logger.add

    def add_sink(*arguments: Any, **keywords: Any) -> int:
        sinks.append(add(*arguments, **keywords))
        return sinks[-1]

    monkeypatch.setattr(logger, "add", add_sink)
    with monkeypatch.context() as patch:
        patch.setattr(logger, "remove", lambda: None)

        def run_here(name: str, *arguments: str, text: str = "") -> None:
            file = str(EXAMPLES / f"{name}.py")
            patch.setattr(sys, "argv", [file, *arguments])
            patch.setattr(sys, "stdin", io.StringIO(text))
            runpy.run_path(file, run_name="__main__")

        yield run_here
    for sink in sinks:
        logger.remove(sink)


@pytest.fixture
def refused(run: Callable[..., None]) -> Callable[..., str]:
    """Runs an example in this process; returns the message that it ends with.

    An interpreter prints the message of `SystemExit` and returns 1.
    """

    def run_here(name: str, *arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            run(name, *arguments)
        assert isinstance(ended.value.code, str)
        return ended.value.code

    return run_here


def assert_speech(file: Path, seconds: float) -> None:
    pcm, rate = soundfile.read(file)
    assert len(pcm) / rate >= seconds and np.abs(pcm).max() > 0.05


def test_a_text_is_saved(run: Callable[..., None], tmp_path: Path) -> None:
    run("say")
    assert_speech(tmp_path / "hello.wav", 0.5)


def test_live_text_writes_its_speech(run: Callable[..., None], tmp_path: Path) -> None:
    run("live_text")
    assert_speech(tmp_path / "live.wav", 0.5)


def test_text_only_repeats_typed_text(tmp_path: Path) -> None:
    """As a command, which the other examples are not run as."""
    run_command("text_only", tmp_path, text="Hello there.\nYes.\n")
    assert_speech(tmp_path / "text_only.wav", 0.7)


class Completions(BaseHTTPRequestHandler):
    """An endpoint compatible with OpenAI's that streams one answer to every request.

    Attributes:
        requests: Path and content of every request.
        authorization: Of the latest request.
    """

    requests: ClassVar[list[tuple[str, dict]]] = []
    authorization: ClassVar[str | None] = None

    def do_POST(self) -> None:
        type(self).authorization = self.headers["Authorization"]
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, content))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in ANSWER.split():
            choice = {"index": 0, "delta": {"role": "assistant", "content": word + " "}}
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "none"}
            line = json.dumps(chunk | {"choices": [choice]})
            self.wfile.write(f"data: {line}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Address of the endpoint."""
    Completions.requests.clear()
    with ThreadingHTTPServer(("localhost", 0), Completions) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_text_only_speaks_the_endpoints_answer(
    endpoint: str,
    run: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint)
    monkeypatch.setenv("OPENAI_MODEL", "some-model")
    run("text_only", text="Hi.\n")
    assert "Traceback" not in capsys.readouterr().err
    ((path, content),) = Completions.requests
    assert path == "/v1/chat/completions"
    assert content["stream"] and content["model"] == "some-model"
    assert content["messages"] == [{"role": "user", "content": "Hi."}]
    assert_speech(tmp_path / "text_only.wav", len(ANSWER.split()) * 0.15)  # far more than "Hi."


def test_text_only_reports_an_endpoint_that_does_not_answer(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("localhost", 0))  # does not accept connections
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://localhost:{closed.getsockname()[1]}/v1")
        run("text_only", text="Hi.\n")
    error = capsys.readouterr().err
    assert "Connection error" in error and "Traceback" not in error


class NoLoudspeaker:
    """Replaces `pyaudio.PyAudio`."""

    def get_default_output_device_info(self) -> None:
        raise OSError


@pytest.mark.parametrize(
    ("pyaudio", "sentence"),
    [
        (None, "--speaker needs PyAudio"),  # importing it raises ImportError
        (SimpleNamespace(PyAudio=NoLoudspeaker), "--speaker finds no loudspeaker"),
    ],
)
def test_text_only_reports_a_missing_loudspeaker(
    pyaudio: object, sentence: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyaudio", pyaudio)
    assert sentence in refused("text_only", "--speaker")


def test_clone_voice_speaks_with_a_recording(
    checkpoint: Callable[..., Path], run: Callable[..., None], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    soundfile.write(tmp_path / "me.wav", rng.uniform(-0.3, 0.3, 24_000 * 3), 24_000)
    model = str(checkpoint("base"))
    run("clone_voice", "me.wav", "The text.", "--model", model, "--seconds", "1")
    pcm, rate = soundfile.read(tmp_path / "clone_voice.wav")
    assert 0 < len(pcm) / rate <= 1 and (tmp_path / "voice.safetensors").is_file()


def test_clone_voice_reports_that_it_made_no_speech(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    refused: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = np.random.default_rng(0)
    soundfile.write(tmp_path / "me.wav", rng.uniform(-0.3, 0.3, 24_000 * 3), 24_000)
    model = str(checkpoint("base"))
    message = refused("clone_voice", "me.wav", "The text.", "--model", model, "--text", "")
    assert "Nothing was spoken" in message
    assert "is in voice.safetensors" not in capsys.readouterr().out


def test_an_invalid_duration_is_a_usage_error(
    run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run("clone_voice", "me.wav", "The text.", "--seconds", "nan")
    assert ended.value.code == 2
    assert "invalid duration value: 'nan'" in capsys.readouterr().err.splitlines()[-1]


def test_error_is_reported_in_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    message = refused("text_only", "--model", "no model")
    assert "'no model' is not a model" in message and "\n" not in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no model", "is not a model"),
        ("", "me.wav does not exist"),
        ("demo", "only Base models clone"),
    ],
)
def test_clone_voice_reports_what_it_cannot_use(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    refused: Callable[..., str],
    model: str,
    message: str,
) -> None:
    arguments = ["me.wav", "The text.", "--model", model or str(checkpoint("base"))]
    found = refused("clone_voice", *arguments)
    assert message in found and "\n" not in found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({}, "DEEPGRAM_API_KEY"),
        ({"OPENAI_BASE_URL": "http://localhost/v1"}, "DEEPGRAM_API_KEY"),
        ({"DEEPGRAM_API_KEY": "none"}, "OPENAI_API_KEY"),
    ],
)
def test_voice_agent_reports_a_missing_key(
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    missing: str,
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    message = refused("voice_agent")
    assert f"{missing} is not set" in message and "examples/text_only.py" in message


@pytest.mark.parametrize("key", [None, "", "secret"])
def test_voice_agent_takes_answers_of_an_endpoint_with_and_without_a_key(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint)
    monkeypatch.setenv("OPENAI_MODEL", "llama3.2")
    if key is not None:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    question = frames.LLMContextFrame(LLMContext([{"role": "user", "content": "Hi."}]))

    async def answer() -> str:
        received, _ = await run_test(voice_agent.language_model(), frames_to_send=[question])
        return "".join(f.text for f in received if isinstance(f, frames.LLMTextFrame))

    assert asyncio.run(answer()).strip() == ANSWER
    ((path, content),) = Completions.requests
    assert path == "/v1/chat/completions" and content["model"] == "llama3.2"
    assert content["messages"][-1] == {"role": "user", "content": "Hi."}
    assert Completions.authorization == f"Bearer {key or 'none'}"


class Loudspeaker(AudioOutput):
    """An output of a LiveKit agent that plays in no time.

    Attributes:
        pcm: What was played: 16-bit samples.
    """

    def __init__(self) -> None:
        super().__init__(
            label="test", capabilities=AudioOutputCapabilities(pause=False), sample_rate=24_000
        )
        self.pcm = b""

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        self.pcm += bytes(frame.data)

    def flush(self) -> None:
        super().flush()
        seconds = len(self.pcm) / 2 / 24_000
        self.on_playback_finished(playback_position=seconds, interrupted=False)

    def clear_buffer(self) -> None:
        """Nothing is in the buffer."""


def test_livekit_agent_speaks_the_endpoints_answer(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("MEGAKERNEL_TTS_KEY", "secret")

    async def answer() -> tuple[bytes, str | None]:
        async with aiohttp.ClientSession() as http, livekit_agent.agent_session() as session:
            assert isinstance(session.tts, cartesia.TTS)
            session.tts._session = http  # which LiveKit's worker provides otherwise
            loudspeaker = session.output.audio = Loudspeaker()
            async with session.tts:  # closes its WebSockets, which the session does not
                await session.start(Agent(instructions=livekit_agent.INSTRUCTION))
                await session.generate_reply(user_input="Hi.")
            return loudspeaker.pcm, session.history.messages()[-1].text_content

    with simulated_tts(num_slots=2, frame_seconds=0.001) as tts:
        tts.warmup()
        with running_server(tts, LOCKED) as server:
            monkeypatch.setenv("MEGAKERNEL_TTS_URL", server.url)
            pcm, text = asyncio.run(answer())
    gc.collect()  # a connection that was not closed fails this test, not a later one
    assert text == ANSWER
    assert words_in_audio(np.frombuffer(pcm, "<i2")) == [*range(8), *range(4)]  # of two sentences
    ((path, content),) = Completions.requests
    assert path == "/v1/chat/completions" and content["messages"][-1]["content"] == "Hi."


def test_livekit_agent_reports_a_missing_key(refused: Callable[..., str]) -> None:
    assert "OPENAI_API_KEY is not set" in refused("livekit_agent", "console")


@pytest.mark.parametrize("example", ["text_only", "voice_agent", "clone_voice", "livekit_agent"])
def test_examples_of_agents_are_short(example: str) -> None:
    lines = (EXAMPLES / f"{example}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120
