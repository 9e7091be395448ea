"""Word times from the model's attention: a barge-in leaves the words that had begun."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from megakernel_tts import TTS, AudioChunk, Sampling
from megakernel_tts.align.alignment import Alignment
from megakernel_tts.engine.engine import Engine
from megakernel_tts.info import model_info
from megakernel_tts.loader import LoadedModel
from pipecat_service import MegakernelTTSService
from tests.align.synthetic_attention import LoudDecoder, SyntheticAttentionBackend
from tests.pipecat_service.bot import Bot, run_conversations
from tests.pipecat_service.test_barge_in import assert_words_match_audio

REPLY = "this is the speech to test, that is all the world: hello to the test."
WORDS: list[str] = [*REPLY.split()]


@pytest.fixture
def timed_tts(load: Callable[..., LoadedModel]) -> Iterator[TTS]:
    """A model with prescribed attention, every frame of which is loud."""
    loaded = load()
    engine = Engine(
        SyntheticAttentionBackend(num_slots=8),
        loaded.engine.prompt_builder,
        LoudDecoder(),
        None,
        Alignment(((0, 0),), 1e-4, 2, {}),
    )
    model = LoadedModel(
        loaded.config, Sampling(seed=1, guard=False), loaded.tokenizer, engine, None
    )
    with TTS(model, model_info(loaded.config, "synthetic attention")) as tts:
        tts.warmup()
        yield tts


def test_barge_in_leaves_the_words_that_had_begun(timed_tts: TTS) -> None:
    stream = timed_tts.stream(REPLY, layout="streaming")
    chunks = [chunk for chunk in stream if isinstance(chunk, AudioChunk)]
    words = [word for chunk in chunks for word in chunk.words]
    starts = [word.start for word in words]
    assert [word.text for word in words] == WORDS
    duration_s = min(8.0, sum(len(chunk.pcm) for chunk in chunks) / 24_000)
    rng = random.Random(5)
    bots = {Bot(timed_tts, REPLY): rng.uniform(0.1, duration_s) for _ in range(6)}

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bot.played_speech_s >= bots[bot])
        await bot.interrupt()

    run_conversations(list(bots), drive)
    for bot in bots:
        assert not bot.tts.word_times_estimated
        assert_words_match_audio(bot, WORDS, starts)
    assert len({len(bot.said[-1]) if bot.said else 0 for bot in bots}) >= 3


def test_the_demo_voice_times_words_by_attention(demo: TTS) -> None:
    text = "Hello there, it is good to hear you."
    settings = MegakernelTTSService.Settings(sampling=Sampling(seed=3))
    bot = Bot(demo, text, settings=settings)
    run_conversations([bot], Bot.reply)
    assert bot.said == [text] and not bot.errors
    assert not bot.tts.word_times_estimated
    assert np.abs(bot.output.pcm).max() > 1000
