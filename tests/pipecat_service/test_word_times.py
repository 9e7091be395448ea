"""Word times by attention: after a barge-in the conversation holds what had begun, and no more."""

import asyncio
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from megakernel_tts import TTS, AudioChunk, Sampling
from megakernel_tts.align.alignment import Alignment
from megakernel_tts.engine.engine import Engine
from megakernel_tts.info import model_info
from megakernel_tts.loader import Loaded
from pipecat_service import MegakernelTTSService
from tests.align.planted import LoudDecoder, PlantedBackend
from tests.pipecat_service.bot import Bot, hold
from tests.pipecat_service.test_barge_in import NEAR, heard_seconds

REPLY = "this is the speech to test, that is all the world: hello to the test."


@pytest.fixture
def planted(load: Callable[..., Loaded]) -> Iterator[TTS]:
    """A model whose attention is planted, and whose every frame sounds."""
    loaded = load()
    engine = Engine(
        PlantedBackend(num_slots=8),
        loaded.engine.prompt_builder,
        LoudDecoder(),
        None,
        Alignment(((0, 0),), 1e-4, 2, {}),
    )
    one = Loaded(loaded.config, Sampling(seed=1, guard=False), loaded.tokenizer, engine, None)
    with TTS(one, model_info(loaded.config, "planted")) as tts:
        tts.warmup()
        yield tts


def test_barge_in_at_random_instants_leaves_the_words_that_had_begun(planted: TTS) -> None:
    stream = planted.stream(REPLY, layout="streaming")
    chunks = [chunk for chunk in stream if isinstance(chunk, AudioChunk)]
    words = [word for chunk in chunks for word in chunk.words]
    starts = [word.start for word in words]
    assert [word.text for word in words] == REPLY.split()
    lasts = min(8.0, sum(len(chunk.pcm) for chunk in chunks) / 24_000)
    rng = random.Random(5)
    bots = {Bot(planted, REPLY): rng.uniform(0.1, lasts) for _ in range(6)}

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await bot.until(lambda: heard_seconds(bot) >= bots[bot])
        await bot.interrupt()
        await asyncio.sleep(0.3)

    hold(list(bots), drive)
    for bot in bots:
        assert not bot.tts.word_times_estimated
        heard = heard_seconds(bot)
        said = bot.said[-1].split() if bot.said else []
        assert said == REPLY.split()[: len(said)]
        assert len(said) >= sum(start < heard - NEAR for start in starts), (said, heard, starts)
        latest = heard + bot.output.late + NEAR
        assert len(said) <= sum(start < latest for start in starts), (said, latest, starts)
    assert len({len(bot.said[-1]) if bot.said else 0 for bot in bots}) >= 3


def test_the_demo_voice_times_its_words_by_attention() -> None:
    """A turn's words are those of the engine, on the clock of the audio that left."""
    text = "Hello there, it is good to hear you."
    with TTS.load("demo", "cpu", slots=1) as tts:
        tts.warmup()
        settings = MegakernelTTSService.Settings(sampling=Sampling(seed=3))
        bot = Bot(tts, text, settings=settings)

        async def drive(bot: Bot) -> None:
            await bot.ask()
            await bot.replies(1)

        hold([bot], drive)
        assert bot.said == [text] and not bot.errors
        assert not bot.tts.word_times_estimated
    assert np.abs(bot.output.pcm).max() > 1000
