import asyncio
import shutil
from collections.abc import Iterator

import pytest

from bench.simulation import simulated_tts
from megakernel_tts import TTS
from megakernel_tts.server.live_speech import LiveSpeech
from tests.browser import chromium
from tests.server.driving import Drive
from tests.server.hearing import record
from tests.server.running import RunningServer, running_server


@pytest.fixture(scope="package")
def engine() -> Iterator[TTS]:
    """Shared, because warming up takes longer than most tests."""
    with simulated_tts(num_slots=4, frame_seconds=0.001) as tts:
        tts.warmup()
        yield tts


@pytest.fixture(autouse=True)
def _no_pauses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy client, which sends text late, is not taken for a pause of its text."""
    if "pauses" not in request.fixturenames:
        monkeypatch.setattr(LiveSpeech, "flush_when_paused", lambda *_: None)


@pytest.fixture
def pauses() -> None:
    """For tests of text that pauses."""


@pytest.fixture(scope="package")
def server(engine: TTS) -> Iterator[RunningServer]:
    """A server with default settings on a loopback port."""
    with running_server(engine) as server:
        yield server


@pytest.fixture(scope="package")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drive]:
    """Runs tests in the page of one browser, which takes seconds to start."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium")
    with asyncio.Runner() as runner:
        browser = chromium(program, tmp_path_factory.mktemp("profile"))
        page = runner.run(browser.__aenter__())
        runner.run(record(page))
        yield lambda test: runner.run(test(page))
        runner.run(browser.__aexit__(None, None, None))
