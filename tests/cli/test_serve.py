import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from megakernel_tts.cli.main import main
from megakernel_tts.server.serving import is_loopback
from tests.fakes import TIMEOUT_S
from tests.server.running import wait_until

# The command, with a simulated model.
SIMULATED = """
import sys
from bench.simulation import simulated_tts
from megakernel_tts import TTS
from megakernel_tts.cli.main import main

TTS.load = lambda model, device, slots: simulated_tts(slots, frame_seconds=0.01)
sys.exit(main(["serve", "--port", "0"]))
"""


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and its base URL."""
    command = [sys.executable, "-c", SIMULATED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            http, socket = process.stdout.readline(), process.stdout.readline()
            url = re.fullmatch(r"OpenAI base URL: (http://.*)/v1\n", http)
            socket_url = re.fullmatch(r"Cartesia WebSocket: ws:(//.*)/tts/websocket\n", socket)
            assert url and socket_url and url[1] == f"http:{socket_url[1]}"
            yield process, url[1]
        finally:
            process.kill()


def test_sigterm_lets_a_stream_finish_and_exits_with_0() -> None:
    with serving() as (process, url):
        body = {"input": "Hello there, my friend. " * 10, "response_format": "pcm"}
        with httpx.stream("POST", f"{url}/v1/audio/speech", json=body, timeout=60) as reply:
            parts = reply.iter_raw()
            next(parts)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: "stopping" in httpx.get(f"{url}/ready").text)
            assert sum(map(len, parts)) > 0  # an incomplete reply raises
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--no-auth"),
        (["--api-key-file", "{keys}", "--no-auth"], "contradict"),
        (["--max-queue", "-1"], "max_queue"),
        (["--voice", "anna"], "NAME=FILE"),
    ],
)
def test_invalid_options_have_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key\n", encoding="utf-8")
    assert main(["serve", *(option.format(keys=keys) for option in options)]) == 2
    assert message in capsys.readouterr().err


def test_an_address_in_use_has_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    from megakernel_tts.server.serving import bind

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
