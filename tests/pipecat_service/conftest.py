import sys
from collections.abc import Iterator

import pytest
from loguru import logger

from bench.simulation import simulated_tts
from megakernel_tts import TTS

logger.remove()  # Pipecat tells of every frame otherwise
logger.add(sys.stderr, level="WARNING")


@pytest.fixture(scope="package")
def engine() -> Iterator[TTS]:
    """Shared: warming up takes longer than most tests."""
    with simulated_tts(slots=16) as tts:
        tts.warmup()
        yield tts
