from collections.abc import Iterator

import pytest

from bench.simulation import simulated_tts
from megakernel_tts import TTS
from tests.server.running import RunningServer, running_server


@pytest.fixture(scope="package")
def engine() -> Iterator[TTS]:
    """Shared, because warming up takes longer than most tests."""
    with simulated_tts(num_slots=4, frame_seconds=0.001) as tts:
        tts.warmup()
        yield tts


@pytest.fixture(scope="package")
def server(engine: TTS) -> Iterator[RunningServer]:
    """A server with default settings on a loopback port."""
    with running_server(engine) as server:
        yield server
