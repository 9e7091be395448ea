"""After gaps in the audio, a barge-in leaves the words whose audio had begun."""

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from pipecat.frames.frames import LLMFullResponseStartFrame

from bench.simulation import RATE, word_onsets
from megakernel_tts import TTS, Session, split_words
from megakernel_tts.session import Event
from tests.pipecat_service.bot import Bot, PacedOutput, run_conversations

pytestmark = pytest.mark.contract

REPLY = "One two three, four five six. Seven eight nine! Ten eleven, twelve thirteen."
WORDS = [word.text for word in split_words(REPLY)]
NUM_BOTS = 5
RESOLUTION_S = 0.001  # of `word_onsets`


class StallingSession:
    """A session whose events are late at random."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self._session = session
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        async for event in self._session:
            if self._rng.random() < 0.3:
                await asyncio.sleep(self._rng.choice((0.1, 4.0)) * self._rng.random())
            yield event


def add_stalls(bot: Bot, rng: random.Random) -> None:
    """Makes the audio of a bot late at random."""
    synthesizer = bot.tts._synthesizer
    open_session = synthesizer.open

    async def open_stalling(*args: object) -> StallingSession:
        return StallingSession(await open_session(*args), rng)  # type: ignore[arg-type]

    synthesizer.open = open_stalling  # type: ignore[method-assign,assignment]


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
        add_stalls(bot, random.Random(rng.random()))
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
