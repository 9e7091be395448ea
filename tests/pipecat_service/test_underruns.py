"""After gaps in the audio, a barge-in leaves the words whose audio had begun."""

import asyncio
import random

import numpy as np
import pytest
from pipecat.frames.frames import (
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
)

from bench.simulation import RATE, word_onsets
from bench.soak_pipeline import add_stalls
from megakernel_tts import TTS, split_words
from tests.pipecat_service.bot import Bot, PacedOutput, run_conversations

pytestmark = pytest.mark.contract

REPLY = "One two three, four five six. Seven eight nine! Ten eleven, twelve thirteen."
WORDS = [word.text for word in split_words(REPLY)]
NUM_BOTS = 5
RESOLUTION_S = 0.001  # of `word_onsets`


def word_starts(output: PacedOutput) -> np.ndarray:
    """Times in seconds at which the words in the output began to be played."""
    ends = np.cumsum([len(pcm) for _, pcm in output.chunks])
    samples = np.array([sample for _, sample in word_onsets(output.pcm)], int)
    chunks = [output.chunks[i] for i in np.searchsorted(ends, samples, "right")]
    offsets = samples - ends[np.searchsorted(ends, samples, "right")] if len(ends) else samples
    return np.array([t + len(pcm) / RATE for t, pcm in chunks]) + offsets / RATE


@pytest.mark.parametrize("num_turns", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_words_are_committed_when_their_audio_begins(engine: TTS, num_turns: int) -> None:
    rng = random.Random(11)
    bots = [Bot(engine, *[REPLY] * num_turns, word_interval_s=0) for _ in range(NUM_BOTS)]
    turns: list[tuple[float, list[str], np.ndarray]] = []  # barge-in, words kept, word starts

    async def drive(bot: Bot) -> None:
        add_stalls(bot.tts, random.Random(rng.random()), share=0.3)
        for _ in range(num_turns):
            num_said = len(bot.said)
            bot.output.clear()
            await bot.request_reply()
            await bot.wait_until(lambda: bool(bot.frames_of(LLMFullResponseStartFrame)))
            await asyncio.sleep(rng.uniform(0, 6))
            now_s = asyncio.get_running_loop().time()
            await bot.interrupt()
            said = " ".join(bot.said[num_said:]).split()
            turns.append((now_s, said, word_starts(bot.output)))
            bot.context.add_message({"role": "user", "content": "Again?"})

    run_conversations(bots, drive)
    for now_s, said, starts in turns:
        assert said == WORDS[: len(said)]
        assert len(said) >= np.count_nonzero(starts < now_s - RESOLUTION_S)
        assert len(said) <= np.count_nonzero(starts < now_s + RESOLUTION_S)
    late = [np.any(np.diff(starts) > 0.7) for _, _, starts in turns]  # a word takes 0.5 s at most
    assert len(turns) == NUM_BOTS * num_turns and np.mean(late) > 0.2, "few turns have a gap"


@pytest.mark.parametrize("pause_s", [5.0, 25.0])  # Pipecat ends a context after 20 s
def test_words_after_a_long_pause_of_the_text_are_committed_when_they_are_spoken(
    engine: TTS, pause_s: float
) -> None:
    bot = Bot(engine)

    async def drive(bot: Bot) -> None:
        await bot.worker.queue_frame(LLMFullResponseStartFrame())
        for word in ("One ", "two ", "three ", "four. "):
            await bot.worker.queue_frame(LLMTextFrame(word))
        await asyncio.sleep(pause_s)
        for word in ("Five ", "six."):
            await bot.worker.queue_frame(LLMTextFrame(word))
        await bot.worker.queue_frame(LLMFullResponseEndFrame())
        await bot.wait_until(lambda: bool(bot.played_of(LLMFullResponseEndFrame)))

    run_conversations([bot], drive)
    assert bot.said == ["One two three four. Five six."] and not bot.errors
