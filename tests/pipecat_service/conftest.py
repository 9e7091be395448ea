import sys
from collections.abc import Iterator

import pytest
from loguru import logger

from bench.simulation import simulated_tts
from bench.virtual_time import observable_engines
from megakernel_tts import TTS
from tests.pipecat_service.agents import running_agent
from tests.pipecat_service.bot import Bot
from tests.pipecat_service.serving import local_sockets

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
    with TTS.load("demo", "cpu", slots=6) as tts:
        with pytest.MonkeyPatch.context() as patch:  # plain torch has nothing to load or compile
            patch.setattr("megakernel_tts.tts.warm_up", lambda *_: None)
            tts.warmup()
        yield tts


@pytest.fixture(scope="package")
def agent() -> Iterator[str]:
    """`scripted_agent` in a process of its own; its host and port."""
    command = "-m", "tests.pipecat_service.scripted_agent"
    twilio = {"TWILIO_ACCOUNT_SID": "AC0", "TWILIO_AUTH_TOKEN": "none"}
    with running_agent(*command, **twilio) as (address, _):
        yield address
