"""After gaps in the audio, a barge-in leaves the words whose audio had begun."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from pipecat.frames.frames import (
    Frame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    TTSTextFrame,
    TTSUpdateSettingsFrame,
)

from bench.simulation import RATE, SimulatedBackend, WordTokenizer, simulated_tts, word_onsets
from bench.soak_pipeline import add_stalls
from megakernel_tts import TTS, split_words
from pipecat_service import MegakernelTTSService
from tests.pipecat_service.bot import Bot, PacedOutput, run_conversations, spaced_words

pytestmark = pytest.mark.usefixtures("service")

REPLY = "One two three, four five six. Seven eight nine! Ten eleven, twelve thirteen."
WORDS = [word.text for word in split_words(REPLY)]
NUM_BOTS = 5
RESOLUTION_S = 0.001  # of `word_onsets`


@contextmanager
def make_engine() -> Iterator[TTS]:
    """A model with one token per word, so that it is never silent while text is missing.

    Words differ from those of the segment before.
    """
    with simulated_tts(16, 0.001, WordTokenizer()) as tts:
        backend = tts._loaded.engine.backend
        assert isinstance(backend, SimulatedBackend)
        backend.distinct_segments = True
        tts.warmup()
        yield tts


@pytest.fixture(scope="module")
def engine() -> Iterator[TTS]:
    with make_engine() as tts:
        yield tts


def word_starts(output: PacedOutput) -> np.ndarray:
    """Times in seconds at which the words in the output began to be played."""
    ends = np.cumsum([len(pcm) for _, pcm in output.chunks])
    samples = np.array([sample for _, sample in word_onsets(output.pcm)], int)
    chunks = [output.chunks[i] for i in np.searchsorted(ends, samples, "right")]
    offsets = samples - ends[np.searchsorted(ends, samples, "right")] if len(ends) else samples
    return np.array([t + len(pcm) / RATE for t, pcm in chunks]) + offsets / RATE


def with_stalls(rng: random.Random) -> tuple[list[str | float], float]:
    """The reply with up to two stalls of the language model; the latest time to interrupt it."""
    words, reply = spaced_words(REPLY), list[str | float]()
    stops = sorted(rng.sample(range(1, len(words)), rng.choice([0, 1, 2])))
    for start, stop in pairwise([0, *stops, len(words)]):
        reply += ["".join(words[start:stop]), rng.choice([rng.uniform(0.1, 4), 2.0, 22.0, 25.0])]
    stalls = [part for part in reply[:-1] if isinstance(part, float)]
    return reply[:-1], 6 + sum(stalls)


def check_interruptions(engine: TTS, seed: int, num_turns: int) -> int:
    """Interrupts turns at random times, after stalls of the language model and of the audio.

    Args:
        engine: From `make_engine`.
        seed: Of replies, stalls and times.
        num_turns: Of each of five conversations.

    Returns:
        The number of interruptions.
    """
    rng = random.Random(seed)
    replies = [[with_stalls(rng) for _ in range(num_turns)] for _ in range(NUM_BOTS)]
    bots = [
        Bot(engine, *(reply for reply, _ in turns), word_interval_s=0, timeout_s=2000.0)
        for turns in replies
    ]
    turns: list[tuple[float, list[str], np.ndarray]] = []  # barge-in, words kept, word starts

    async def drive(bot: Bot) -> None:
        add_stalls(bot.tts, random.Random(rng.random()), share=0.3)
        for _, latest_s in replies[bots.index(bot)]:
            num_said = len(bot.said)
            bot.output.clear()
            await bot.request_reply()
            await bot.wait_until(lambda: bool(bot.frames_of(LLMFullResponseStartFrame)))
            await asyncio.sleep(rng.uniform(0, latest_s))
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
    gaps = [np.diff(starts).max(initial=0) for _, _, starts in turns]  # a word takes 0.5 s at most
    assert not any(bot.errors for bot in bots)
    assert np.mean([gap > 0.7 for gap in gaps]) > 0.3 and max(gaps) > 20, "few turns have a gap"
    return len(turns)


@pytest.mark.parametrize(
    ("service", "num_turns"),
    [
        ("local", 6),
        pytest.param("local", 40, marks=pytest.mark.slow),
        pytest.param("remote", 40, marks=pytest.mark.slow),
    ],
    indirect=["service"],
)
def test_words_are_committed_when_their_audio_begins(engine: TTS, num_turns: int) -> None:
    """`tests.pipecat_service.search` checks other seeds."""
    assert check_interruptions(engine, 11, num_turns) == 5 * num_turns


BEFORE = "One two three four five six seven eight nine ten eleven twelve. "
AFTER = "Thirteen fourteen."


async def strip_stars(text: str, _: str) -> str:
    """A transform that may leave no words of a group."""
    return text.replace("*", "")


@pytest.mark.contract
@pytest.mark.parametrize("pause_s", [5.0, 25.0])  # Pipecat ends a context after 20 s
@pytest.mark.parametrize("rate", [24_000, 16_000])
def test_words_after_a_long_pause_of_the_text_are_committed_when_they_are_spoken(
    engine: TTS, pause_s: float, rate: int
) -> None:
    bot = Bot(engine, [BEFORE, pause_s, AFTER], rate=rate)
    run_conversations([bot], Bot.reply)
    assert bot.said == [BEFORE + AFTER] and not bot.errors
    times_s, (end_s,) = bot.times_of(TTSTextFrame), bot.times_of(LLMFullResponseEndFrame)
    if rate == RATE:  # whose audio the analysis reads
        assert times_s == pytest.approx(word_starts(bot.output), abs=RESOLUTION_S)
    assert times_s[12] == pytest.approx(bot.llm.times_s[-2], abs=0.05)  # with its text
    assert end_s == pytest.approx(times_s[-1], abs=RESOLUTION_S)


@pytest.mark.parametrize("pause_s", [5.0, 28.0])
def test_an_interruption_after_a_long_pause_leaves_the_words_that_had_begun(
    engine: TTS, pause_s: float
) -> None:
    bots = {Bot(engine, [BEFORE, pause_s, REPLY]): k for k in (0.1, 1.7, 3.3)}

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: len(bot.llm.times_s) > len(BEFORE.split()))
        await asyncio.sleep(bots[bot])
        await bot.interrupt()

    run_conversations([*bots], drive)
    for bot in bots:
        assert bot.said[0].split() == [*BEFORE.split(), *WORDS][: len(word_starts(bot.output))]
    assert len({bot.said[0] for bot in bots}) == len(bots)


CHANGE = TTSUpdateSettingsFrame(delta=MegakernelTTSService.Settings(voice="serena"))


@pytest.mark.contract
@pytest.mark.parametrize(
    ("text", "rest"),
    [(BEFORE, []), ("… ", []), ("**… ** ", []), (BEFORE, [CHANGE, AFTER]), (BEFORE, [CHANGE])],
)
def test_a_turn_that_ends_after_a_long_pause_leaves_no_session(
    engine: TTS, text: str, rest: list[str | Frame]
) -> None:
    """Pipecat has ended the context by then."""
    bot = Bot(engine, [text, 25.0, *rest], "Next.", text_transforms=[("*", strip_stars)])

    async def drive(bot: Bot) -> None:
        await bot.reply()
        await asyncio.sleep(1.0)
        assert engine._loaded.engine.num_sessions == 0 and not bot.tts._contexts
        await bot.reply()

    run_conversations([bot], drive)
    said = " ".join([text.strip(), *(part for part in rest if isinstance(part, str)), "Next."])
    assert " ".join(bot.said) == said and not bot.errors


@pytest.mark.contract
def test_an_interruption_during_a_long_pause_leaves_no_session(engine: TTS) -> None:
    bot = Bot(engine, [BEFORE, 60.0, AFTER], "Next.")

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: len(bot.llm.times_s) == 12)
        await asyncio.sleep(30.0)
        await bot.interrupt()
        assert engine._loaded.engine.num_sessions == 0 and not bot.tts._contexts
        await bot.reply()

    run_conversations([bot], drive)
    assert " ".join(bot.said) == f"{BEFORE}Next." and not bot.errors


@pytest.mark.contract
@pytest.mark.parametrize("start", ["… ", "**… ** "])
def test_a_turn_that_begins_without_words_may_pause(engine: TTS, start: str) -> None:
    """A context without audio is an error of the service for Pipecat, three of which disable it."""
    bot = Bot(engine, [start, 25.0, "One two."], text_transforms=[("*", strip_stars)])
    run_conversations([bot], Bot.reply)
    assert bot.said == [f"{start}One two."] and not bot.errors
