"""After a barge-in the conversation holds the words whose speech had begun, and no others."""

import asyncio
import re
from itertools import accumulate

import pytest
from pipecat.frames.frames import (
    LLMFullResponseStartFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
)

from bench.simulation import words_in_audio
from megakernel_tts import TTS, split_words
from megakernel_tts.align.estimate import spoken_seconds
from tests.pipecat_service.bot import Bot, run_conversations

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("service")]

REPLY = "One two three, four five six. Seven eight nine! Ten eleven, twelve thirteen."
WORDS = [word.text for word in split_words(REPLY)]
STARTS = [0.0, *accumulate(spoken_seconds(word) for word in WORDS)][:-1]
RESOLUTION_S = 0.12  # an output passes on 40 ms of audio at a time, the engine 80 ms


def without_tags(text: str) -> list[str]:
    """The words of a text that has no other angle brackets."""
    return re.sub(r"<[^>]*>", "", text).split()


def assert_words_match_audio(bot: Bot, words: list[str], starts: list[float]) -> None:
    """The last message ends with the word that was being spoken.

    Args:
        bot: After an interruption.
        words: Of the reply.
        starts: Of the words, in seconds of speech.
    """
    played_s = bot.played_speech_s
    said = without_tags(bot.said[-1]) if bot.said else []
    assert said == words[: len(said)]
    assert len(said) >= sum(start < played_s - RESOLUTION_S for start in starts), (said, played_s)
    assert len(said) <= sum(start < played_s + RESOLUTION_S for start in starts), (said, played_s)


def assert_reply_cut(bot: Bot) -> None:
    """The conversation ends where the audio does, and no word was skipped or repeated."""
    assert_words_match_audio(bot, WORDS, STARTS)
    numbers = words_in_audio(bot.output.pcm)
    assert numbers == list(range(len(numbers)))


def test_barge_in_leaves_the_words_that_had_begun(engine: TTS) -> None:
    """Within a word, between words, between sentences, and in the last word."""
    instants = [0.05, 0.4, 0.8, 1.25, 1.75, 2.1, 2.6, 3.0, 3.5, 3.9]
    bots = {Bot(engine, REPLY): instant for instant in instants}

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bot.played_speech_s >= bots[bot])
        await bot.interrupt()

    run_conversations(list(bots), drive)
    for bot in bots:
        assert_reply_cut(bot)
        assert not bot.errors
    lengths = {len(bot.said[-1].split()) if bot.said else 0 for bot in bots}
    assert min(lengths) <= 3 and max(lengths) >= len(WORDS) - 1
    assert len(lengths) >= 6, "the instants are too close to each other"


def test_barge_in_before_the_first_audio_leaves_no_words(engine: TTS) -> None:
    bots = [Bot(engine, REPLY, word_interval_s=interval) for interval in (0.001, 0.05)]

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bool(bot.frames_of(LLMFullResponseStartFrame)))
        await bot.interrupt()

    run_conversations(bots, drive)
    for bot in bots:
        assert bot.said == [] and not bot.errors


def test_barge_in_after_the_last_word_leaves_the_whole_reply(engine: TTS) -> None:
    bot = Bot(engine, REPLY)

    async def drive(bot: Bot) -> None:
        await bot.reply()
        await asyncio.sleep(0.7)
        await bot.interrupt()

    run_conversations([bot], drive)
    assert bot.said == [REPLY]


def test_words_are_committed_while_their_sentence_is_being_written(engine: TTS) -> None:
    bot = Bot(engine, REPLY, word_interval_s=0.15)

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bot.played_speech_s >= 0.8)
        await bot.interrupt()

    run_conversations([bot], drive)
    assert bot.said
    assert_reply_cut(bot)


def test_words_after_a_barge_in_are_timed_from_the_start_of_their_own_turn(engine: TTS) -> None:
    """Audio that was sent and dropped does not delay the words of the next turn."""
    bot = Bot(engine, REPLY, REPLY)

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bot.played_speech_s >= 0.5)
        await bot.interrupt()
        bot.output.clear()
        bot.context.add_message({"role": "user", "content": "Again?"})
        await bot.request_reply()
        await bot.wait_until(lambda: bot.played_speech_s >= 1.3)
        await bot.interrupt()

    run_conversations([bot], drive)
    assert len(bot.said) == 2
    assert_reply_cut(bot)


def test_barge_in_stops_the_engine_and_wastes_at_most_its_lead(engine: TTS) -> None:
    bot = Bot(engine, "Word after word of a reply that is interrupted long before its end, " * 6)
    sessions = engine._loaded.engine

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bot.played_speech_s >= 2)
        assert sessions.num_sessions == 1
        num_frames = sessions.backend.num_made - num_frames_before  # type: ignore[attr-defined]
        assert num_frames * 0.08 <= bot.played_speech_s + 3.2, "the engine runs too far ahead"
        await bot.interrupt(settle_s=0.001)
        assert sessions.num_sessions == 0
        assert sessions.num_free_slots == sessions.backend.num_slots

    num_frames_before = sessions.backend.num_made  # type: ignore[attr-defined]
    run_conversations([bot], drive)


def test_speech_that_may_not_be_interrupted_plays_to_its_end(engine: TTS) -> None:
    notice = "This call is being recorded."
    bot = Bot(engine, REPLY)

    async def drive(bot: Bot) -> None:
        speak = TTSSpeakFrame(notice)
        speak.interruptible = False
        await bot.worker.queue_frame(speak)
        await bot.wait_until(lambda: bot.played_speech_s >= 0.4)
        await bot.interrupt(settle_s=0.1)
        await bot.reply()

    run_conversations([bot], drive)
    assert " ".join(bot.said) == f"{notice} {REPLY}"  # Pipecat begins a message at the barge-in
    assert words_in_audio(bot.output.pcm) == [*range(5), *range(len(WORDS))]


def test_scripts_without_spaces_are_committed_one_character_at_a_time(engine: TTS) -> None:
    text = "你好世界，今天天气很好。我们去公园。"
    whole, cut = Bot(engine, text), Bot(engine, text)

    async def drive(bot: Bot) -> None:
        if bot is whole:
            await bot.reply()
            return
        await bot.request_reply()
        await bot.wait_until(lambda: bot.played_speech_s >= 1.5)
        await bot.interrupt()

    run_conversations([whole, cut], drive)
    assert whole.said == [text]
    assert text.startswith(cut.said[0]) and 6 <= len(cut.said[0]) <= 10


@pytest.mark.parametrize("word_interval_s", [0.005, 0.03])
def test_first_audio_waits_for_no_timer(engine: TTS, word_interval_s: float) -> None:
    """Only timers take virtual time: the first audio is sent with the second word."""
    bot = Bot(engine, REPLY, word_interval_s=word_interval_s)
    run_conversations([bot], Bot.reply)
    started = bot.first_time_of(LLMFullResponseStartFrame)
    waited = bot.first_time_of(TTSAudioRawFrame) - started
    assert waited == pytest.approx(2 * word_interval_s)
