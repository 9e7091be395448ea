"""Services that name a model: when it is loaded, shared and closed."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
from loguru import logger
from pipecat.frames.frames import EndFrame, TTSAudioRawFrame
from pipecat.metrics.metrics import TTFBMetricsData
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.workers.runner import WorkerRunner

from bench.simulation import simulated_tts
from megakernel_tts import TTS, CheckpointError, Sampling
from pipecat_service import MegakernelTTSService
from pipecat_service.loading import _SharedModel, shared_engine
from tests.fakes import TIMEOUT_S
from tests.pipecat_service.bot import Bot, run_conversations

Settings = MegakernelTTSService.Settings


class Disk:
    """Stands in for `TTS.load`.

    Attributes:
        loaded: Engines, in order.
        broken: Whether there is no such model.
        ready: Loading waits for it.
    """

    def __init__(self) -> None:
        self.loaded: list[TTS] = []
        self.broken = False
        self.ready = threading.Event()
        self.ready.set()
        self._loading = threading.Event()
        self._closed = threading.Condition()

    def load(self, model: str) -> TTS:
        self._loading.set()
        assert self.ready.wait(TIMEOUT_S), "loading blocks the event loop"
        if self.broken:
            raise CheckpointError(f"There is no model {model}.")
        engine = simulated_tts(num_slots=4, frame_seconds=0.001)
        self.loaded.append(engine)
        engine.close = partial(self._close, engine.close)  # type: ignore[method-assign]
        return engine

    def _close(self, close: Callable[[], None]) -> None:
        close()
        with self._closed:
            self._closed.notify_all()

    @property
    def open(self) -> list[bool]:
        """Whether each engine is open."""
        return [not engine._loaded.engine._loop.closed for engine in self.loaded]

    async def wait_until_loading(self) -> None:
        """Waits until a model is being loaded."""
        assert await asyncio.to_thread(self._loading.wait, TIMEOUT_S)

    def wait_until_open(self, *expected: bool) -> None:
        """Waits until these engines are open; a thread closes them."""
        with self._closed:
            assert self._closed.wait_for(lambda: self.open == [*expected], TIMEOUT_S), self.open


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    one = Disk()
    monkeypatch.setattr(TTS, "load", one.load)
    yield one
    assert not any(one.open), "an engine was not closed"
    assert not _SharedModel.models, "an engine was kept"


def test_making_a_service_loads_nothing(disk: Disk) -> None:
    tts = MegakernelTTSService(model="some-model", settings=Settings(voice="serena"))
    assert not disk.loaded
    assert tts.settings.given_fields()["model"] == "some-model"


def test_concurrent_conversations_share_an_engine(disk: Disk) -> None:
    bots = [Bot(None, "One two three.", model="some-model") for _ in range(3)]
    run_conversations(bots, Bot.reply)
    assert len(disk.loaded) == 1
    for bot in bots:
        assert not bot.errors
        assert bot.said == ["One two three."]


def test_loading_does_not_block_the_event_loop(disk: Disk) -> None:
    async def use() -> None:
        disk.ready.clear()
        async with AsyncExitStack() as stack:
            loading = asyncio.create_task(
                stack.enter_async_context(shared_engine(TTS.load, "some-model"))
            )
            await disk.wait_until_loading()
            assert not loading.done()
            disk.ready.set()
            assert (await loading).warm
        await asyncio.to_thread(disk.wait_until_open, False)

    asyncio.run(use())


def test_the_last_user_closes_the_engine(disk: Disk) -> None:
    async def users() -> None:
        async with shared_engine(TTS.load, "some-model") as first:
            again, other = (shared_engine(TTS.load, name) for name in ("some-model", "other"))
            async with again as second, other as third:
                assert first is second is not third
            await asyncio.to_thread(disk.wait_until_open, True, False)
            assert first.say("Hello.", sampling=Sampling(max_frames=2)).seconds
        await asyncio.to_thread(disk.wait_until_open, False, False)
        async with shared_engine(TTS.load, "some-model"):
            await asyncio.to_thread(disk.wait_until_open, False, False, True)
        await asyncio.to_thread(disk.wait_until_open, False, False, False)

    asyncio.run(users())


def test_cancelling_one_user_does_not_cancel_loading_for_another(disk: Disk) -> None:
    async def use() -> None:
        async with shared_engine(TTS.load, "some-model") as engine:
            assert engine.warm

    async def users() -> None:
        disk.ready.clear()
        kept, cancelled = asyncio.create_task(use()), asyncio.create_task(use())
        await disk.wait_until_loading()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        disk.ready.set()
        await kept
        await asyncio.to_thread(disk.wait_until_open, False)

    asyncio.run(users())


@pytest.mark.parametrize("reused", [True, False])
def test_a_model_without_users_is_reused_or_closed_once_loaded(disk: Disk, reused: bool) -> None:
    """Pipecat abandons a slow setup; the next service finds the model being loaded."""
    service = MegakernelTTSService(model="some-model")
    slow = PipelineWorker(
        Pipeline([service]), enable_rtvi=False, setup_timeout_secs=0.1, start_timeout_secs=0.1
    )

    async def abandon() -> None:
        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(slow)
        await asyncio.wait_for(runner.run(), TIMEOUT_S)

    async def use() -> None:
        disk.ready.clear()
        await abandon()
        if reused:
            async with AsyncExitStack() as stack:
                using = stack.enter_async_context(shared_engine(TTS.load, "some-model"))
                loading = asyncio.create_task(using)
                await asyncio.sleep(0)
                disk.ready.set()
                assert (await loading).warm
        disk.ready.set()
        await asyncio.to_thread(disk.wait_until_open, False)

    asyncio.run(use())
    assert len(disk.loaded) == 1


def test_a_model_loaded_after_its_user_was_cancelled_is_closed_as_the_event_loop_ends(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    async def cancel() -> None:
        disk.ready.clear()
        loading = asyncio.create_task(shared_engine(TTS.load, "some-model").__aenter__())
        await disk.wait_until_loading()
        loading.cancel()
        threading.Timer(0.1, disk.ready.set).start()  # while the event loop shuts its executor down

    asyncio.run(cancel())
    disk.wait_until_open(False)
    assert not caplog.records


def test_a_model_that_cannot_be_loaded_is_a_permanent_error(disk: Disk) -> None:
    disk.broken = True
    bots = [Bot(None, "One two.", model="some-model") for _ in range(2)]
    run_conversations(bots, Bot.reply)
    for bot in bots:
        assert "There is no model some-model." in bot.errors[0].error
        assert not bot.tts.is_usable
        assert not bot.frames_of(TTSAudioRawFrame)
        assert bot.played_of(EndFrame)
    disk.broken = False
    repaired = Bot(None, "One two.", model="some-model")
    run_conversations([repaired], Bot.reply)
    assert repaired.said == ["One two."]


def test_the_setting_model_names_the_model_that_is_loaded(disk: Disk) -> None:
    bot = Bot(None, "One two.", settings=Settings(model="some-model"))
    run_conversations([bot], Bot.reply)
    assert bot.said == ["One two."] and len(disk.loaded) == 1
    assert "some-model" in {m.model for m in bot.metrics(TTFBMetricsData)}


def test_a_voice_that_the_model_lacks_is_a_permanent_error(disk: Disk) -> None:
    bot = Bot(None, "One two.", model="some-model", settings=Settings(voice="unknown"))
    run_conversations([bot], Bot.reply)
    assert "choose one of: ryan, serena" in bot.errors[0].error
    assert not bot.tts.is_usable


def test_loading_is_logged_with_its_duration(tmp_path: Path, no_warm_up: None) -> None:
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    missing = Bot(None, "Good morning.", model=tmp_path)
    bot = Bot(None, "Good morning.", model="demo", settings=Settings(sampling=Sampling(seed=1)))
    run_conversations([missing, bot], Bot.reply)
    logger.remove(handler)
    assert bot.said == ["Good morning."]
    assert "config.json" in missing.errors[0].error
    begun, ready = (line for line in lines if "demo" in line.split())
    assert begun == "Loading and warming up demo"
    assert ready.startswith("demo is ready after ") and ready.endswith(" s")
