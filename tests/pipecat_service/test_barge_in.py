"""After a barge-in the conversation holds the words that were heard, and those alone."""

import asyncio
from itertools import accumulate

import numpy as np
from pipecat.frames.frames import LLMFullResponseStartFrame, TTSSpeakFrame

from bench.simulation import heard_words
from megakernel_tts import TTS, split_words
from megakernel_tts.align.estimate import spoken_seconds
from tests.pipecat_service.bot import Bot, hold

REPLY = "One two three, four five six. Seven eight nine! Ten eleven, twelve thirteen."
WORDS = [word.text for word in split_words(REPLY)]
BEGINS = [0.0, *accumulate(spoken_seconds(word) for word in WORDS)][:-1]
NEAR = 0.12  # seconds: an output hands audio on in pieces of 40 ms, and so does the engine of 80


def heard_seconds(bot: Bot) -> float:
    return float(np.count_nonzero(np.abs(bot.output.pcm) > 1000)) / 24_000


def assert_what_was_heard(bot: Bot) -> None:
    """The conversation ends where the audio does."""
    heard = heard_seconds(bot)
    said = bot.said[-1].split() if bot.said else []
    assert said == WORDS[: len(said)]
    assert len(said) >= sum(begin < heard - NEAR for begin in BEGINS), (said, heard)
    latest = heard + bot.output.late + NEAR
    assert len(said) <= sum(begin < latest for begin in BEGINS), (said, heard, latest)
    numbers = heard_words(bot.output.pcm)
    assert numbers == list(range(len(numbers))), "words were skipped or said twice"


def test_barge_in_at_many_instants_leaves_the_words_that_were_heard(engine: TTS) -> None:
    """Mid-word, between words, between sentences, and in the last word."""
    instants = [0.05, 0.4, 0.8, 1.25, 1.75, 2.1, 2.6, 3.0, 3.5, 3.9]
    bots = {Bot(engine, REPLY): instant for instant in instants}

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await bot.until(lambda: heard_seconds(bot) >= bots[bot])
        await bot.interrupt()
        await asyncio.sleep(0.3)

    hold(list(bots), drive)
    for bot in bots:
        assert_what_was_heard(bot)
        assert not bot.errors
    lengths = {len(bot.said[-1].split()) if bot.said else 0 for bot in bots}
    assert min(lengths) <= 3 and max(lengths) >= len(WORDS) - 1
    assert len(lengths) >= 6, "the instants do not lie apart"


def test_barge_in_before_the_first_audio_leaves_nothing(engine: TTS) -> None:
    bots = [Bot(engine, REPLY, delay=delay) for delay in (0.001, 0.05)]

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await bot.until(lambda: bool(bot.of(LLMFullResponseStartFrame)))
        await bot.interrupt()
        await asyncio.sleep(0.3)

    hold(bots, drive)
    for bot in bots:
        assert bot.said == [] and not bot.errors


def test_barge_in_after_the_last_word_leaves_all(engine: TTS) -> None:
    bot = Bot(engine, REPLY)

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await bot.replies(1)
        await asyncio.sleep(0.7)
        await bot.interrupt()
        await asyncio.sleep(0.1)

    hold([bot], drive)
    assert bot.said == [REPLY]


def test_a_slow_language_model_changes_nothing(engine: TTS) -> None:
    """Words are heard while their sentence is still being written."""
    bot = Bot(engine, REPLY, delay=0.15)

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await bot.until(lambda: heard_seconds(bot) >= 0.8)
        await bot.interrupt()
        await asyncio.sleep(0.3)

    hold([bot], drive)
    assert bot.said
    assert_what_was_heard(bot)


def test_the_turn_after_a_barge_in_is_counted_from_its_own_beginning(engine: TTS) -> None:
    """Audio that was sent and dropped does not delay the words of the next turn."""
    bot = Bot(engine, REPLY, REPLY)

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await bot.until(lambda: heard_seconds(bot) >= 0.5)
        await bot.interrupt()
        await asyncio.sleep(0.3)
        bot.output.chunks.clear()
        bot.context.add_message({"role": "user", "content": "Again?"})
        await bot.ask()
        await bot.until(lambda: heard_seconds(bot) >= 1.3)
        await bot.interrupt()
        await asyncio.sleep(0.3)

    hold([bot], drive)
    assert len(bot.said) == 2
    assert_what_was_heard(bot)


def test_the_engine_stops_within_a_frame_and_little_was_made_in_vain(engine: TTS) -> None:
    long = "Word after word of a reply that nobody wants to hear to its end, " * 6
    bot = Bot(engine, long)
    sessions = engine._loaded.engine

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await bot.until(lambda: heard_seconds(bot) >= 2)
        assert sessions.num_sessions == 1
        made = sessions.backend.made - before  # type: ignore[attr-defined]
        assert made * 0.08 <= heard_seconds(bot) + 3.2, "the engine runs too far ahead"
        await bot.interrupt()
        await bot.until(lambda: sessions.num_sessions == 0, 0.5)
        assert sessions.num_free_slots == sessions.backend.num_slots

    before = sessions.backend.made  # type: ignore[attr-defined]
    hold([bot], drive)


def test_speech_that_may_not_be_interrupted_is_heard_to_its_end(engine: TTS) -> None:
    notice = "This call is being recorded."
    bot = Bot(engine, REPLY)

    async def drive(bot: Bot) -> None:
        speak = TTSSpeakFrame(notice)
        speak.interruptible = False
        await bot.worker.queue_frame(speak)
        await bot.until(lambda: heard_seconds(bot) >= 0.4)
        await bot.interrupt()
        await asyncio.sleep(0.1)
        await bot.ask()
        await bot.replies(1)

    hold([bot], drive)
    assert " ".join(bot.said) == f"{notice} {REPLY}"  # Pipecat begins a message at the barge-in
    assert heard_words(bot.output.pcm) == [*range(5), *range(len(WORDS))]


def test_words_without_spaces_are_heard_one_character_at_a_time(engine: TTS) -> None:
    text = "你好世界，今天天气很好。我们去公园。"
    whole, cut = Bot(engine, text), Bot(engine, text)

    async def drive(bot: Bot) -> None:
        await bot.ask()
        if bot is whole:
            await bot.replies(1)
            return
        await bot.until(lambda: heard_seconds(bot) >= 1.5)
        await bot.interrupt()
        await asyncio.sleep(0.3)

    hold([whole, cut], drive)
    assert whole.said == [text]
    assert text.startswith(cut.said[0]) and 6 <= len(cut.said[0]) <= 10
