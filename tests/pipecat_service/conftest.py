import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

from bench.simulation import simulated_tts
from bench.virtual_time import observable_engines
from megakernel_tts import TTS
from tests.pipecat_service.bot import TIMEOUT_S, Bot
from tests.pipecat_service.serving import local_sockets

ROOT = Path(__file__).parents[2]

logger.remove()  # Pipecat logs every frame at the default level
logger.add(sys.stderr, level="WARNING")


@pytest.fixture(scope="package", autouse=True)
def _observable_engines() -> Iterator[None]:
    with observable_engines():
        yield


@pytest.fixture(params=["local", "remote"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs a test with the engine in the process of the service, and with it behind a server."""
    monkeypatch.setattr(Bot, "remote", request.param == "remote")
    with local_sockets():
        yield


@pytest.fixture(scope="package")
def engine() -> Iterator[TTS]:
    """Shared, because warming up takes longer than most tests."""
    with simulated_tts(num_slots=16, frame_seconds=0.001) as tts:
        tts.warmup()
        yield tts


@pytest.fixture(scope="package")
def demo() -> Iterator[TTS]:
    """The included voice."""
    with TTS.load("demo", "cpu", slots=2) as tts:
        tts.warmup()
        yield tts


@pytest.fixture(scope="package")
def agent() -> Iterator[str]:
    """`scripted_agent` in a process of its own; its host and port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.pipecat_service.scripted_agent", "--port", "0"],
        cwd=ROOT,
        env=os.environ | {"TWILIO_ACCOUNT_SID": "AC0", "TWILIO_AUTH_TOKEN": "none"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    log: list[str] = []
    started = threading.Event()  # or the process has ended

    def read_log() -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                log.append(line)
                if "Uvicorn running on" in line:
                    started.set()
        started.set()

    reader = threading.Thread(target=read_log)
    reader.start()
    try:
        assert started.wait(2 * TIMEOUT_S), "the agent does not start"
        address = re.search(r"running on http://([^ ]+)", "".join(log))
        assert address is not None, "".join(log)
        yield address[1]
    finally:
        process.kill()  # on SIGTERM, the runner waits for callers to disconnect
        process.wait()
        reader.join()
