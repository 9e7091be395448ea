import argparse
import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest
from wyoming.client import AsyncTcpClient
from wyoming.tts import Synthesize

from megakernel_tts.cli.main import main
from megakernel_tts.cli.serve import _allowed_hosts, _host_name, _wyoming_address
from megakernel_tts.server.serving import bind, is_loopback
from tests.fakes import TIMEOUT_S
from tests.server.running import is_stopping, wait_until

# The command, with a simulated model.
SIMULATED = """
import gc
import sys

gc.disable()  # of torch's import; the command keeps what was imported out of collections
from bench.simulation import simulated_tts
from megakernel_tts import TTS
from megakernel_tts.cli.main import main

TTS.load = lambda *_, slots, **options: simulated_tts(slots, frame_seconds=0.01)
sys.exit(main(["serve", "--port", "0", *sys.argv[1:]]))
"""

# Only a signal ends a stream that is not read, `drain_timeout_s` after it.
LIMITS = """
from functools import partial
from megakernel_tts.server import playback, serving, settings

settings.ServerSettings = partial(settings.ServerSettings, drain_timeout_s={drain_timeout_s})
serving.CLOSE_TIMEOUT_S = 0.2
serving.UNREAD_TIMEOUT_S = playback.MAX_BEHIND_S = 1e6
"""

# Exits if a file is opened for writing.
READ_ONLY = """
import os
import sys

def exit_at_writes(event, args):
    if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
        written = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if written and not os.fsdecode(args[0]).startswith("/dev/"):
            os._exit(3)
    if event in ("os.mkdir", "os.rename", "os.symlink", "os.remove", "tempfile.mkstemp"):
        os._exit(3)

sys.addaudithook(exit_at_writes)
sys.dont_write_bytecode = True
"""


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """The command changes the logging of its process, which later tests must not see."""
    handlers, server = [*logging.getLogger().handlers], logging.getLogger("megakernel_tts.server")
    formatters, level = [handler.formatter for handler in handlers], server.level
    yield
    for handler, formatter in zip(handlers, formatters, strict=True):
        handler.setFormatter(formatter)
    server.setLevel(level)


@contextmanager
def serving(
    *options: str,
    program: str = SIMULATED,
    stderr: int | IO[str] = subprocess.PIPE,
    environment: dict[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and its base URL."""
    command = [sys.executable, "-c", program, *options]
    environment = os.environ | (environment or {})
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            page, http, socket = (process.stdout.readline() for _ in range(3))
            url = re.fullmatch(r"OpenAI base URL: (http://.*)/v1\n", http)
            socket_url = re.fullmatch(r"Cartesia WebSocket: ws:(//.*)/tts/websocket\n", socket)
            assert url and socket_url and url[1] == f"http:{socket_url[1]}"
            assert page == f"Web page: {url[1]}/\n"
            yield process, url[1]
        finally:
            process.kill()


@pytest.mark.parametrize("place", [("--device", "cpu"), ("--gpus", "0")])
def test_the_engine_refuses_its_arguments(place: tuple[str, str]) -> None:
    """Also in a process of its own."""
    program = "import sys; from megakernel_tts.cli.main import main; sys.exit(main(sys.argv[1:]))"
    options = ["serve", "--port", "0", *place, "--prefill-positions", "0"]
    command = [sys.executable, "-c", program, *options]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "0 positions of prompts between two frames are too few" in process.stderr


def test_sigterm_lets_streams_finish_and_exits_with_0() -> None:
    """Of HTTP and of Wyoming."""
    text = "Hello there, my friend. " * 10

    async def speak(port: int, begin_stop: Callable[[], None]) -> list[str]:
        async with asyncio.timeout(TIMEOUT_S), AsyncTcpClient("127.0.0.1", port) as client:
            await client.write_event(Synthesize(text).event())
            types: list[str] = []
            while (event := await client.read_event()) is not None:
                if not types:
                    begin_stop()
                types.append(event.type)
            return types

    with serving("--wyoming", "127.0.0.1:0") as (process, url):
        assert process.stdout is not None
        wyoming = re.fullmatch(r"Wyoming: tcp://127.0.0.1:(\d+)\n", process.stdout.readline())
        assert wyoming

        def begin_stop() -> None:
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_stopping(url))

        body = {"input": text, "response_format": "pcm"}
        with (
            ThreadPoolExecutor(1) as reader,
            httpx.stream("POST", f"{url}/v1/audio/speech", json=body) as reply,
        ):
            parts = reply.iter_raw()
            next(parts)
            num_bytes = reader.submit(lambda: sum(map(len, parts)))  # an incomplete reply raises
            types = asyncio.run(speak(int(wyoming[1]), begin_stop))
            assert types[0] == "audio-start" and types[-1] == "audio-stop"
            assert num_bytes.result() > 0
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("drain_timeout_s", "num_signals"),
    [(1e6, 2), (0.2, 1)],
    ids=["second signal", "drain timeout"],
)
def test_a_long_stream_does_not_keep_the_server(drain_timeout_s: float, num_signals: int) -> None:
    limits = LIMITS.format(drain_timeout_s=drain_timeout_s)
    with serving(program=limits + SIMULATED) as (process, url):
        body = {"input": "Hello there, my friend. " * 1000, "response_format": "pcm"}
        with httpx.stream("POST", f"{url}/v1/audio/speech", json=body) as reply:
            wait_until(lambda: 'running{model_name="simulated"} 1' in metrics(url))
            for _ in range(num_signals):
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: process.poll() is not None or is_stopping(url))
            assert process.wait(TIMEOUT_S) == 0
            with pytest.raises(httpx.RemoteProtocolError):
                reply.read()


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics").text


def stop(process: subprocess.Popen[str]) -> str:
    """Stops the command and returns what it has written to standard error."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0
    return process.stderr.read() if process.stderr else ""


def speak(url: str, **headers: str) -> None:
    body = {"input": "Hello there."}
    reply = httpx.post(f"{url}/v1/audio/speech", json=body, headers=headers)
    assert reply.status_code == 200 and len(reply.content) > 10_000


def test_a_server_without_keys_has_the_names_of_its_options_and_logs_each_request(
    tmp_path: Path,
) -> None:
    """And its configuration."""
    file = tmp_path / "config.toml"
    names = "allowed-host = ['a.example', 'B.example']\n"
    file.write_text(f"max-queue = 5\nlog-format = 'json'\n{names}", encoding="utf-8")
    environment = {"MEGAKERNEL_TTS_SLOTS": "2", "MEGAKERNEL_TTS_CONFIG": str(file)}
    with serving("--queue-timeout", "3", environment=environment) as (process, url):
        for host in ("localhost", "a.example:8000", "b.example"):
            assert status_under(url, host) == 200
        assert status_under(url, "c.example") == 403
        speak(url)
        lines = [json.loads(line) for line in stop(process).splitlines()]
    (configuration,) = [line for line in lines if line["message"] == "configuration"]
    assert (configuration["max-queue"], configuration["slots"]) == (5, 2)
    assert configuration["from_file"] == "max-queue, allowed-host, log-format"
    assert configuration["from_environment"] == "slots"
    assert configuration["from_command_line"] == "port, queue-timeout"
    (request,) = [line for line in lines if line["message"] == "speech"]
    assert request["finish_reason"] == "stop" and request["characters"] == 12


def status_under(url: str, host: str) -> int:
    """Status of a request from a page under a host, with a key."""
    headers = {"Host": host, "Origin": f"http://{host}", "X-API-Key": "secret"}
    return httpx.get(f"{url}/v1/models", headers=headers).status_code


@pytest.mark.parametrize(
    ("host", "keys", "names", "allowed"),
    [
        ("127.0.0.1", False, [], ["127.0.0.1"]),
        ("localhost", False, ["a.example"], ["localhost", "a.example"]),
        ("127.0.0.1", True, [], None),
        ("0.0.0.0", False, [], None),
        ("speech.example", False, [], None),
        ("speech.example", True, ["a.example"], ["speech.example", "a.example"]),
    ],
)
def test_names_are_limited_where_only_the_machine_itself_needs_no_key(
    host: str, keys: bool, names: list[str], allowed: list[str] | None
) -> None:
    file = Path("keys.toml") if keys else None
    options = argparse.Namespace(host=host, api_key_file=file, allowed_host=names)
    assert _allowed_hosts(options) == allowed


@pytest.mark.parametrize(
    "option", ["http://a.example", "a.example:80", "a.example/", "*.example", "", "[::1", "a@b"]
)
def test_names_of_hosts_have_nothing_else(option: str) -> None:
    with pytest.raises(ValueError if option == "[::1" else argparse.ArgumentTypeError):
        _host_name(option)


def test_the_server_writes_no_file_and_a_full_disk_below_its_log_stops_nothing(
    tmp_path: Path,
) -> None:
    """With keys, where a proxy may pass any name on."""
    keys = tmp_path / "keys"
    keys.write_text("[[key]]\nname = 'bot'\nkey = 'secret'\n", encoding="utf-8")
    program = READ_ONLY + SIMULATED
    with Path("/dev/full").open("w") as full:
        with serving("--api-key-file", str(keys), program=program, stderr=full) as (process, url):
            assert status_under(url, "speech.example") == 200
            for _ in range(2):
                speak(url, Authorization="Bearer secret")
            stop(process)


def test_traces_need_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delitem(sys.modules, "megakernel_tts.server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert main(["serve", "--port", "0"]) == 2
    assert "megakernel-tts[otel]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "reach 0.0.0.0; give api-key-file"),
        (["--api-key-file", "{keys}", "--no-auth"], "contradict"),
        (["--max-queue", "-1"], "max_queue"),
        (["--max-connections", "0"], "max_connections"),
        (["--config", "{port}"], "from 0 to 65535"),
        (["--voice", "anna"], "NAME=FILE"),
        (["--voice-dir", "{keys}"], "not a folder"),
        (["--wyoming", "0.0.0.0"], "has no keys"),
        (["--wyoming", "0.0.0.0:10300", "--api-key-file", "{keys}"], "has no keys"),
        (["--zeroconf", "voice"], "give --wyoming"),
        (["--wyoming", "--zeroconf", "voice"], "needs another address"),
        (["--config", "{host}"], "'speech.example:8000' is no name of a host"),
        (["--pronunciations", "{keys}"], "is invalid"),
        (["--tls-cert", "{keys}"], "belong together"),
        (["--tls-cert", "{keys}", "--tls-key", "{keys}"], "PEM"),
        (["--config", "{keys}"], "key is unknown"),
    ],
)
def test_invalid_options_have_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("[[key]]\nname = 'bot'\nkey = 'secret'\n", encoding="utf-8")
    port = tmp_path / "port"
    port.write_text("port = 65536", encoding="utf-8")
    host = tmp_path / "host"
    host.write_text("allowed-host = ['speech.example:8000']", encoding="utf-8")
    files = {"keys": keys, "port": port, "host": host}
    assert main(["serve", *(option.format(**files) for option in options)]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "megakernel_tts.server.wyoming", raising=False)
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    assert main(["serve", "--port", "0", "--wyoming", "127.0.0.1:0"]) == 2
    assert "megakernel-tts[wyoming]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "address"),
    [
        ("localhost", ("localhost", 10_200)),
        ("0.0.0.0:10300", ("0.0.0.0", 10_300)),
        ("[::1]:0", ("::1", 0)),
    ],
)
def test_addresses_have_a_host_and_maybe_a_port(option: str, address: tuple[str, int]) -> None:
    assert _wyoming_address(option) == address


@pytest.mark.parametrize("option", ["host:port", "host/path", ":10200", "", "host:70000"])
def test_other_addresses_are_refused(option: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="HOST:PORT"):
        _wyoming_address(option)


@pytest.mark.parametrize("option", ["65536", "-1", "http", "80.0"])
def test_other_ports_are_refused(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--port", option])
    assert caught.value.code == 2
    assert f"{option!r} is no port" in capsys.readouterr().err


def test_an_address_in_use_has_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as listener:
        assert main(["serve", "--port", str(listener.getsockname()[1])]) == 1
    assert "in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("example.com", False), ("192.168.0.1", False)],
)  # fmt: skip
def test_loopback_addresses_are_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
