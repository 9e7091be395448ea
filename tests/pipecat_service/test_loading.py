"""Services that name a model: when it is loaded, who shares it, and who closes it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from loguru import logger
from pipecat.frames.frames import EndFrame, TTSAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.workers.runner import WorkerRunner

from bench.simulation import simulated_tts
from megakernel_tts import TTS, CheckpointError, Sampling
from pipecat_service import MegakernelTTSService
from pipecat_service.loading import _Shared, shared_engine
from tests.pipecat_service.bot import PATIENCE, Bot, hold

Settings = MegakernelTTSService.Settings


class Disk:
    """Where models are loaded from.

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

    def load(self, model: str) -> TTS:
        assert self.ready.wait(PATIENCE), "nobody else runs while a model is loaded"
        if self.broken:
            raise CheckpointError(f"There is no model {model}.")
        self.loaded.append(simulated_tts(num_slots=4))
        return self.loaded[-1]

    @property
    def open(self) -> list[bool]:
        """Which of the engines are not closed."""
        return [not engine._loaded.engine._loop.closed for engine in self.loaded]

    async def settled(self, *expected: bool) -> None:
        """Waits until these engines are open; they are closed on a thread."""
        async with asyncio.timeout(PATIENCE):
            while self.open != [*expected]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    one = Disk()
    monkeypatch.setattr(TTS, "load", one.load)
    yield one
    assert not any(one.open), "somebody closes every engine"
    assert not _Shared.table, "nothing is kept"


async def one_reply(bot: Bot) -> None:
    await bot.ask()
    await bot.replies(1)


def test_an_engine_or_a_model_and_not_both(engine: TTS) -> None:
    with pytest.raises(ValueError, match="found neither"):
        MegakernelTTSService()
    with pytest.raises(ValueError, match="found both"):
        MegakernelTTSService(engine=engine, model="demo")


def test_making_a_service_loads_nothing(disk: Disk) -> None:
    tts = MegakernelTTSService(model="some-model", settings=Settings(voice="serena"))
    assert not disk.loaded
    assert tts.settings.given_fields()["model"] == "some-model"


def test_conversations_side_by_side_share_an_engine(disk: Disk) -> None:
    bots = [Bot(None, "One two three.", model="some-model") for _ in range(3)]
    hold(bots, one_reply)
    assert len(disk.loaded) == 1
    for bot in bots:
        assert not bot.errors
        assert bot.said == ["One two three."]


def test_the_event_loop_goes_on_while_a_model_is_loaded(disk: Disk) -> None:
    async def both() -> None:
        disk.ready.clear()
        async with AsyncExitStack() as stack:
            coming = asyncio.create_task(stack.enter_async_context(shared_engine("some-model")))
            await asyncio.sleep(0.05)
            assert not coming.done()
            disk.ready.set()
            assert (await coming).warm
        await disk.settled(False)

    asyncio.run(both())


def test_the_last_user_closes_the_engine(disk: Disk) -> None:
    async def users() -> None:
        async with shared_engine("some-model") as first:
            async with shared_engine("some-model") as second, shared_engine("other") as third:
                assert first is second is not third
            await disk.settled(True, False)
            assert first.say("Hello.", sampling=Sampling(max_frames=2)).seconds
        await disk.settled(False, False)
        async with shared_engine("some-model"):
            await disk.settled(False, False, True)
        await disk.settled(False, False, False)

    asyncio.run(users())


def test_who_stops_waiting_does_not_decide_for_the_others(disk: Disk) -> None:
    async def use() -> None:
        async with shared_engine("some-model") as engine:
            assert engine.warm

    async def users() -> None:
        disk.ready.clear()
        patient, hurried = asyncio.create_task(use()), asyncio.create_task(use())
        await asyncio.sleep(0.02)
        hurried.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hurried
        disk.ready.set()
        await patient
        await disk.settled(False)

    asyncio.run(users())


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_is_loaded_for_nobody_is_closed_or_found(disk: Disk, comes_back: bool) -> None:
    """Pipecat gives a slow setup up; the next call finds the model half loaded."""
    service = MegakernelTTSService(model="some-model")
    slow = PipelineWorker(
        Pipeline([service]), enable_rtvi=False, setup_timeout_secs=0.1, start_timeout_secs=0.1
    )

    async def give_up() -> None:
        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(slow)
        await asyncio.wait_for(runner.run(), PATIENCE)

    async def calls() -> None:
        disk.ready.clear()
        await give_up()
        if comes_back:
            async with AsyncExitStack() as stack:
                coming = asyncio.create_task(stack.enter_async_context(shared_engine("some-model")))
                await asyncio.sleep(0.02)
                disk.ready.set()
                assert (await coming).warm
        disk.ready.set()
        await disk.settled(False)

    asyncio.run(calls())
    assert len(disk.loaded) == 1


def test_what_is_loaded_when_the_event_loop_ends_is_closed(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    async def leaves() -> None:
        disk.ready.clear()
        coming = asyncio.create_task(shared_engine("some-model").__aenter__())
        await asyncio.sleep(0.02)
        coming.cancel()
        threading.Timer(0.1, disk.ready.set).start()

    asyncio.run(leaves())
    asyncio.run(disk.settled(False))
    assert not caplog.records


def test_a_model_that_cannot_be_loaded_is_a_permanent_error(disk: Disk) -> None:
    disk.broken = True
    bots = [Bot(None, "One two.", model="some-model") for _ in range(2)]

    async def drive(bot: Bot) -> None:
        await one_reply(bot)

    hold(bots, drive)
    for bot in bots:
        assert "There is no model some-model." in bot.errors[0].error
        assert not bot.tts.is_usable
        assert not bot.of(TTSAudioRawFrame)
        assert any(isinstance(frame, EndFrame) for frame in bot.played)
    disk.broken = False
    mended = Bot(None, "One two.", model="some-model")
    hold([mended], one_reply)
    assert mended.said == ["One two."]


def test_a_voice_that_the_model_lacks_is_a_permanent_error(disk: Disk) -> None:
    bot = Bot(None, "One two.", model="some-model", settings=Settings(voice="nobody"))
    hold([bot], one_reply)
    assert "choose one of: ryan, serena" in bot.errors[0].error
    assert not bot.tts.is_usable


def test_a_folder_speaks_and_the_log_tells_how_long_it_took(tmp_path: Path) -> None:
    told: list[str] = []
    number = logger.add(lambda message: told.append(message.record["message"]), level="INFO")
    missing = Bot(None, "Good morning.", model=tmp_path)
    bot = Bot(None, "Good morning.", model="demo", settings=Settings(sampling=Sampling(seed=1)))
    hold([missing, bot], one_reply)
    logger.remove(number)
    assert bot.said == ["Good morning."]
    assert "config.json" in missing.errors[0].error
    begun, ready = (line for line in told if "demo" in line)
    assert begun == "Loading and warming up demo"
    assert ready.startswith("demo is ready after ") and ready.endswith(" s")
