import asyncio
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

from bench.simulation import simulated_tts
from megakernel_tts import TTS
from tests.pipecat_service.bot import PATIENCE

ROOT = Path(__file__).parents[2]

logger.remove()  # Pipecat tells of every frame otherwise
logger.add(sys.stderr, level="WARNING")


@pytest.fixture(scope="package")
def engine() -> Iterator[TTS]:
    """Shared: warming up takes longer than most tests."""
    with simulated_tts(num_slots=16) as tts:
        tts.warmup()
        yield tts


@pytest.fixture(scope="package")
def agent() -> Iterator[str]:
    """`scripted_agent` in a process of its own; its host and port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.pipecat_service.scripted_agent", "--port", str(port)],
        cwd=ROOT,
        env=os.environ
        | {"OMP_NUM_THREADS": "2", "TWILIO_ACCOUNT_SID": "AC0", "TWILIO_AUTH_TOKEN": "none"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        asyncio.run(_answers(f"http://localhost:{port}/status"))
        yield f"localhost:{port}"
    finally:
        process.kill()  # asked politely, the runner waits for callers to hang up
        process.wait()


async def _answers(address: str) -> None:
    async with asyncio.timeout(2 * PATIENCE):
        while True:
            try:
                urllib.request.urlopen(address, timeout=1).close()  # noqa: ASYNC210
                return
            except OSError:
                await asyncio.sleep(0.2)
