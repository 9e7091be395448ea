"""Pauses of the language model do not stop speech within a phrase."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest
from pipecat.frames.frames import (
    FunctionCallFromLLM,
    LLMFullResponseEndFrame,
    TTSStartedFrame,
    TTSTextFrame,
)
from pipecat.services.llm_service import FunctionCallParams

from bench.simulation import SimulatedBackend, WordTokenizer, simulated_tts
from megakernel_tts import TTS, split_words
from megakernel_tts.align.estimate import spoken_seconds
from pipecat_service import MegakernelTTSService
from tests.pipecat_service.bot import Bot, leading_spaces, run_conversations

SENTENCES = (
    "Let me check that for you.",
    "Your package will arrive on Thursday afternoon, between two and four.",
    "I am sorry, but the library closes early on Sunday.",
    "Can you tell me more about the problem?",
    "My brother works for a large company in Berlin, and he likes it there.",
    "There is no sugar left in the kitchen; I will buy some tomorrow.",
    "Yes, of course!",
    "I have turned off the lights in the living room and locked the door.",
    "The train to Hamburg leaves at nine, and the next one an hour later.",
    "Is there anything else that I can do for you today?",
)
LONG_CLAUSE = (
    "the parcel that you ordered on Monday from our shop in the old town will arrive at your house "
    "on Friday afternoon if the driver finds a place to park there"
)
STALL_S = 3.0
MAX_GAP_S = 0.1
_STEP_S = 0.02  # of the analysis of audio


@pytest.fixture(scope="module")
def scarce() -> Iterator[TTS]:
    """A model with one token per word; a segment begins with 60 ms of silence and ends with 80."""
    with simulated_tts(64, 0.001, WordTokenizer()) as tts:
        backend = tts._loaded.engine.backend
        assert isinstance(backend, SimulatedBackend)
        backend.num_silent_intervals, backend.num_trailing_intervals = 3, 4
        backend.distinct_segments = True
        tts.warmup()
        yield tts


def tokens(text: str) -> list[str]:
    """Words with the space before them, in parts of three letters at most."""
    return [part for word in leading_spaces(text) for part in re.findall(r"\s*\S{1,3}", word)]


def spoken_words(bot: Bot) -> list[tuple[float, float, float]]:
    """Start, end and duration in seconds of each played word.

    Adjacent words differ in loudness. A gap that is longer than allowed divides a word in two.
    """
    words: list[tuple[float, float, float]] = []
    level_before = 0
    for chunk_s, pcm in bot.output.chunks:
        steps = np.abs(pcm.astype(int)).reshape(-1, int(_STEP_S * bot.output.sample_rate))
        for i, level in enumerate(np.median(steps, axis=1).astype(int).tolist()):
            start_s, end_s = chunk_s + i * _STEP_S, chunk_s + (i + 1) * _STEP_S
            if level and level == level_before and start_s - words[-1][1] <= MAX_GAP_S:
                words[-1] = words[-1][0], end_s, words[-1][2] + _STEP_S
            elif level:
                words.append((start_s, end_s, _STEP_S))
            level_before = level or level_before
    return words


def speech_between_gaps(bot: Bot) -> list[float]:
    """Seconds of speech that was played before each gap longer than `MAX_GAP_S`, and at the end."""
    rate, step = bot.output.sample_rate, int(_STEP_S * bot.output.sample_rate)
    times_s = [at + i / rate for at, pcm in bot.output.chunks for i in range(0, len(pcm), step)]
    loudness = np.median(np.abs(bot.output.pcm.astype(int)).reshape(-1, step), axis=1)
    speech_s = np.array(times_s)[loudness > 500]
    gaps = np.flatnonzero(np.diff(speech_s) > MAX_GAP_S + _STEP_S) + 1
    counts = np.diff(gaps, prepend=0, append=len(speech_s))
    return (counts * _STEP_S).tolist()


def assert_spoken(bot: Bot, text: str, allowed: set[int]) -> None:
    """Every word was spoken once and as a whole, with long gaps at allowed places only.

    Args:
        bot: After its reply.
        text: The reply.
        allowed: Numbers of words after which there may be a gap.
    """
    words = spoken_words(bot)
    expected = [spoken_seconds(word) for word in text.split()]
    assert [duration for *_, duration in words] == pytest.approx(expected, abs=1.5 * _STEP_S)
    gaps = {i: words[i][0] - words[i - 1][1] for i in range(1, len(words))}
    bad = {i: round(gap, 3) for i, gap in gaps.items() if gap > MAX_GAP_S and i not in allowed}
    assert not bad, f"gaps in seconds after words: {bad}"
    assert bot.said == [text] and not bot.errors


def phrase_ends(text: str) -> set[int]:
    """Numbers of words after which a phrase ends."""
    return {i for i, word in enumerate(split_words(text), 1) if word.ends_clause}


@pytest.mark.parametrize(
    ("tokenize", "paces"),
    [(leading_spaces, (3, 7, 30)), (list, (5, 13))],
    ids=["words", "characters"],
)
def test_a_steady_model_leaves_no_gap_within_a_phrase(
    scarce: TTS, tokenize: Callable[[str], list[str]], paces: Sequence[int]
) -> None:
    text = " ".join(SENTENCES[4:])
    bots = [
        Bot(scarce, text, word_interval_s=1 / words_per_s, tokenize=tokenize)
        for words_per_s in paces
    ]
    run_conversations(bots, Bot.reply)
    for bot in bots:
        assert_spoken(bot, text, phrase_ends(text))


@pytest.mark.parametrize(("num_words", "paces"), [(20, (7,)), (26, (4, 30)), (30, (13,))])
def test_a_long_clause_is_spoken_without_a_gap(
    scarce: TTS, num_words: int, paces: Sequence[int]
) -> None:
    """Its parts are segments, whose silence is limited."""
    text = " ".join(LONG_CLAUSE.split()[:num_words]) + "."
    bots = [
        Bot(scarce, text, word_interval_s=1 / words_per_s, tokenize=leading_spaces)
        for words_per_s in paces
    ]
    run_conversations(bots, Bot.reply)
    for bot in bots:
        assert_spoken(bot, text, set())


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_a_steady_model_leaves_no_gap_at_another_speed(scarce: TTS, speed: float) -> None:
    """Faster speech needs more words ahead. Gaps are where the speech before ends a phrase."""
    text = " ".join(SENTENCES[4:8])
    settings = MegakernelTTSService.Settings(speed=speed)
    bots = [
        Bot(scarce, text, word_interval_s=1 / words_per_s, settings=settings)
        for words_per_s in (10, 22)
    ]
    run_conversations(bots, Bot.reply)
    ends_s = np.array([*accumulate(spoken_seconds(word) / speed for word in text.split())])
    phrase_ends_s = ends_s[[i - 1 for i in phrase_ends(text)]]
    for bot in bots:
        end_s = 0.0  # of the phrase before the last gap, in seconds of speech
        for speech_s in speech_between_gaps(bot):
            distances = np.abs(phrase_ends_s - (end_s + speech_s))
            assert distances.min() < 0.05 + 0.01 * speech_s, (
                f"a gap after {end_s + speech_s:.2f} s of speech"
            )
            end_s = phrase_ends_s[distances.argmin()]
        assert end_s == ends_s[-1]
        assert bot.said == [text] and not bot.errors


@pytest.mark.parametrize(
    ("sentences", "words_per_s", "tokenize"),
    [
        (SENTENCES[::4], 3, leading_spaces),
        (SENTENCES[2::4], 30, leading_spaces),
        (SENTENCES[::4], 7, list),
        *(
            pytest.param(SENTENCES, pace, tokenize, marks=pytest.mark.slow)
            for pace in (3, 5, 7, 30)
            for tokenize in (leading_spaces, list)
        ),
    ],
)
def test_a_stall_stops_no_word_before_it(
    scarce: TTS,
    sentences: Sequence[str],
    words_per_s: int,
    tokenize: Callable[[str], list[str]],
) -> None:
    """The words before a stall are spoken during it. Every word boundary has a stall in one run."""
    bots: dict[Bot, tuple[str, range]] = {}
    for sentence in sentences:
        words = leading_spaces(sentence)
        for first in (1, 2, 3):
            stalls = range(first, len(words), 3)
            reply: list[str | float] = []
            for start, stop in pairwise([0, *stalls, len(words)]):
                reply += ["".join(words[start:stop]), STALL_S]
            bot = Bot(scarce, reply[:-1], word_interval_s=1 / words_per_s, tokenize=tokenize)
            bots[bot] = sentence, stalls
    run_conversations([*bots], Bot.reply)
    for bot, (sentence, stalls) in bots.items():
        assert_spoken(bot, sentence, {*stalls, *phrase_ends(sentence)})
        spoken, words = spoken_words(bot), leading_spaces(sentence)
        for k in stalls:
            stalled_s = bot.llm.times_s[len(tokenize("".join(words[:k]))) - 1]
            assert spoken[k - 1][1] < stalled_s + STALL_S < spoken[k][0]


@pytest.mark.contract
def test_a_sentence_before_a_tool_call_is_spoken_to_its_end(scarce: TTS) -> None:
    first, second = "Let me check that for you.", " The library closes early."
    bot = Bot(scarce, [first, 6.0, second], word_interval_s=0.02, tokenize=leading_spaces)

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bool(bot.frames_of(TTSTextFrame)))
        await asyncio.sleep(3.0)
        words = [frame.text for frame in bot.played_of(TTSTextFrame)]
        assert words == first.split(), "words are committed during the call"
        assert bot.tts._sender.lead_s(bot.tts._turn_context()) == 0, "a rounding error delays text"
        await bot.wait_until(lambda: bool(bot.played_of(LLMFullResponseEndFrame)))

    run_conversations([bot], drive)
    assert_spoken(bot, first + second, {6})
    assert len(bot.frames_of(TTSStartedFrame)) == 1, "the turn has one context"


@pytest.mark.contract
def test_speech_before_and_after_a_tool_call_is_spoken(scarce: TTS) -> None:
    """The call ends the response of the language model; its result starts another."""
    calls: list[FunctionCallParams] = []
    called = asyncio.Event()

    async def look_up(call: FunctionCallParams) -> None:
        calls.append(call)
        called.set()

    first, second = "Let me check that for you.", "The library closes early on Sunday."
    call = FunctionCallFromLLM("look_up", "call 1", {}, None)
    bot = Bot(scarce, [first, call], second, word_interval_s=0.02, tokenize=leading_spaces)
    bot.llm.register_function("look_up", look_up)

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await called.wait()
        await asyncio.sleep(4.0)
        words = [frame.text for frame in bot.played_of(TTSTextFrame)]
        assert words == first.split(), "words are spoken during the call"
        await calls[0].result_callback({"closes": "17:00"})
        await bot.wait_until(lambda: len(bot.played_of(LLMFullResponseEndFrame)) == 2)

    run_conversations([bot], drive)
    words = spoken_words(bot)
    expected = [spoken_seconds(word) for word in f"{first} {second}".split()]
    assert [duration for *_, duration in words] == pytest.approx(expected, abs=1.5 * _STEP_S)
    gaps = [after[0] - before[1] for before, after in pairwise(words)]
    assert [i for i, gap in enumerate(gaps, 1) if gap > MAX_GAP_S] == [6]
    assert bot.said == [first, second] and not bot.errors


@pytest.mark.parametrize("tokenize", [tokens, list], ids=["parts of words", "characters"])
def test_a_stall_within_a_word_does_not_divide_it_while_there_is_speech(
    scarce: TTS, tokenize: Callable[[str], list[str]]
) -> None:
    start = " ".join(["So, the fast train from Berlin", *SENTENCES[8].split()[2:3]])
    bot = Bot(scarce, [f"{SENTENCES[4]} {start} Ham", 1.0, "burg leaves soon."], tokenize=tokenize)
    run_conversations([bot], Bot.reply)
    text = f"{SENTENCES[4]} {start} Hamburg leaves soon."
    assert_spoken(bot, text, phrase_ends(text))
    assert "Hamburg" in [frame.text for frame in bot.played_of(TTSTextFrame)]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["Take it to Ham", "burg tomorrow."], "Take it to Hamburg tomorrow."),
        (["Take it to Ham", " burg tomorrow."], "Take it to Ham burg tomorrow."),
        (["Ham", "burg", " is", " nice."], "Hamburg is nice."),
        (["It is 3.", "14", " or", " so."], "It is 3.14 or so."),
        (["A", " b", "c", "d", " e."], "A bcd e."),
        (["你好", "世界。", "Ham", "burg。"], "你好世界。 Hamburg。"),
        (["Yes.", '"', " he said"], 'Yes." he said'),
    ],
)
def test_a_word_that_a_long_stall_divides_is_one_word_in_the_conversation(
    engine: TTS, parts: list[str], said: str
) -> None:
    reply: list[str | float] = []
    for part in parts:
        reply += [part, 6.0]
    bot = Bot(engine, reply[:-1], word_interval_s=0.02, tokenize=tokens)
    run_conversations([bot], Bot.reply)
    assert bot.said == [said] and not bot.errors


def test_a_short_stall_does_not_divide_speech(scarce: TTS) -> None:
    """Speech continues in the same segment if text arrives before its audio ends."""
    start = f"{SENTENCES[0]} {SENTENCES[2]} Your package will arrive on"
    reply = [start, 0.3, " Thursday."]
    bot = Bot(scarce, reply, word_interval_s=0.02, tokenize=leading_spaces)
    run_conversations([bot], Bot.reply)
    assert_spoken(bot, f"{start} Thursday.", set())


@pytest.mark.contract
def test_an_interruption_discards_held_words(scarce: TTS, monkeypatch: pytest.MonkeyPatch) -> None:
    bot = Bot(scarce, ["Let", 60.0, " me."], word_interval_s=0.02, tokenize=leading_spaces)
    is_held, notify = asyncio.Event(), bot.tts._pause_timer.notify

    def report_held_word() -> None:
        notify()
        if bot.tts._words.holds_words:
            is_held.set()

    monkeypatch.setattr(bot.tts._pause_timer, "notify", report_held_word)

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await is_held.wait()
        await bot.interrupt(settle_s=2.0)

    run_conversations([bot], drive)
    assert not bot.output.chunks and not bot.said and not bot.errors
