"""Tags, pronunciations and speed in a conversation, which keeps the words as they are written."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from pipecat.frames.frames import TTSTextFrame, TTSUpdateSettingsFrame

from megakernel_tts import TTS, split_words
from megakernel_tts.align.estimate import spoken_seconds
from pipecat_service import MegakernelTTSService
from tests.pipecat_service.bot import Bot, run_conversations
from tests.pipecat_service.test_barge_in import assert_words_match_audio, without_tags

pytestmark = pytest.mark.usefixtures("service")

Settings = MegakernelTTSService.Settings
TABLE = {"GPU": "gee pee you", "nginx": "engine ex"}
REPLY = (
    'The (GPU) is <spell>AB 12</spell>, and <emotion value="calm"/>nginx runs. '
    'Wait <break time="0.5s"/>for it, please. <speed ratio="1.2"/>Bye.'
)
WRITTEN = ["The", "(GPU)", "is", "AB", "12,", "and", "nginx", "runs.", "Wait", "for", "it,"]
WRITTEN += ["please.", "Bye."]
SPOKEN = ["The", "(gee pee you)", "is", "A B", "1 2,", "and", "engine ex", "runs.", "Wait", "for"]
SPOKEN += ["it,", "please.", "Bye."]


def words(text: str) -> list[str]:
    """One token per word, with the space before it."""
    return re.findall(r"\s*\S+", text)


@pytest.mark.contract
@pytest.mark.parametrize("tokenize", [words, list], ids=["words", "characters"])
def test_the_conversation_keeps_the_text_and_no_tag_is_spoken(
    engine: TTS, tokenize: Callable[[str], list[str]]
) -> None:
    bot = Bot(engine, REPLY, tokenize=tokenize, settings=Settings(pronunciations=TABLE))
    run_conversations([bot], Bot.reply)
    assert bot.said == [REPLY] and not bot.errors
    committed = [frame.text for frame in bot.frames_of(TTSTextFrame)]
    assert [without_tags(text) for text in committed] == [[word] for word in WRITTEN]
    spoken_s = sum(spoken_seconds(text) for text in SPOKEN)
    assert bot.played_speech_s == pytest.approx(spoken_s, abs=0.1)


def test_a_break_is_silence_of_its_length(engine: TTS) -> None:
    text = '<break time="0.4s"/>One two.<break time="0.8s"/>Three four.'
    bots = [Bot(engine, text), Bot(engine, text, settings=Settings(speed=2.0))]
    run_conversations(bots, Bot.reply)
    for bot in bots:
        loud = np.flatnonzero(np.abs(bot.output.pcm.astype(int)) > 500) / bot.output.sample_rate
        first_s, gap_s = loud[0], np.diff(loud).max()
        assert first_s == pytest.approx(0.4, abs=0.01)
        assert 0.8 <= gap_s < 0.8 + 0.1, "segments of the simulated model begin and end with speech"
        assert bot.said == [text]


def test_a_barge_in_leaves_the_written_words_that_had_begun(engine: TTS) -> None:
    """The words that are spoken in place of a word count as that word."""
    reply = " ".join(REPLY.split()).replace('<break time="0.5s"/>', "")
    starts = np.cumsum([0.0, *(spoken_seconds(text) for text in SPOKEN)])[:-1].tolist()
    instants = [0.1, 0.4, 0.7, 0.95, 1.3, 1.6, 1.9, 2.3, 2.7, 3.2]
    bots = {
        Bot(engine, reply, tokenize=list, settings=Settings(pronunciations=TABLE)): instant
        for instant in instants
    }

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bot.played_speech_s >= bots[bot])
        await bot.interrupt()

    run_conversations(list(bots), drive)
    lengths = set[int]()
    for bot in bots:
        assert reply.startswith(bot.said[-1] if bot.said else "")
        assert_words_match_audio(bot, WRITTEN, starts)
        lengths.add(len(without_tags(bot.said[-1])) if bot.said else 0)
        assert not bot.errors
    assert len(lengths) >= 6, "the instants are too close to each other"


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_a_barge_in_leaves_the_words_that_had_begun_at_another_speed(
    engine: TTS, speed: float
) -> None:
    text = "One two three, four five six. Seven eight nine! Ten eleven, twelve thirteen."
    expected = [word.text for word in split_words(text)]
    seconds = [spoken_seconds(word) / speed for word in expected]
    bots = {Bot(engine, text, settings=Settings(speed=speed)): share for share in (0.2, 0.5, 0.8)}

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bot.played_speech_s >= bots[bot] * sum(seconds))
        await bot.interrupt()

    run_conversations(list(bots), drive)
    for bot in bots:
        assert_words_match_audio(bot, expected, np.cumsum([0.0, *seconds])[:-1].tolist())


@pytest.mark.contract
def test_a_turn_with_tags_only_is_no_speech(engine: TTS) -> None:
    bot = Bot(engine, '<emotion value="sad"/> <break time="1s"/>', "Hello.")

    async def drive(bot: Bot) -> None:
        await bot.reply()
        await bot.reply()

    run_conversations([bot], drive)
    assert bot.said[-1] == "Hello." and not bot.errors


@pytest.mark.contract
def test_the_controls_may_change_within_a_turn(engine: TTS) -> None:
    change = TTSUpdateSettingsFrame(delta=Settings(speed=2.0, pronunciations={"SQL": "sequel"}))
    invalid = TTSUpdateSettingsFrame(delta=Settings(speed=9.0))
    bot = Bot(engine, ["One two three. ", change, invalid, "SQL six seven."])
    run_conversations([bot], Bot.reply)
    assert bot.said == ["One two three. SQL six seven."]
    seconds = spoken_seconds("One two three.") + spoken_seconds("sequel six seven.") / 2
    assert bot.played_speech_s == pytest.approx(seconds, abs=0.1)
    assert [error.error for error in bot.errors] == [
        "speed is 9.0; it must be a number from 0.5 to 2."
    ]
