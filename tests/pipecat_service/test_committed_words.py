"""A search with random responses: the conversation holds the words that were spoken, in order."""

import random
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
from pipecat.frames.frames import TTSTextFrame

from bench.simulation import words_in_audio
from megakernel_tts import TTS
from megakernel_tts.align.estimate import spoken_seconds
from tests.pipecat_service.bot import Bot, Reply, run_conversations

pytestmark = pytest.mark.contract

_NUM_CONCURRENT = 12  # has a slot each
_NUM_WORDS = 60, 240
_NUM_BETWEEN_STALLS = 4, 60  # words
_STALL_S = 0.1, 4.0  # ordinary gaps, and pauses at which speech is flushed
_WORDS_PER_S = 3, 30
_MIN_DIVIDED = 4  # characters of a word that is divided into tokens
_MIN_DIVIDED_PER_S = 8  # words, so that a token comes within 0.15 s, which is no pause
_MIN_WORD_S = spoken_seconds("a")
_TIMEOUT_S = 1000.0  # virtual, of a response


def random_words(rng: random.Random) -> list[str]:
    """Words of all lengths that differ from their neighbours, with marks."""
    words = []
    for i in range(rng.randint(*_NUM_WORDS)):
        letters = "".join(rng.choices("abcdeilmnoprstuwz", k=rng.choice([1, 2, 3, 5, 8, 13])))
        word = f"{letters}{'abc'[i % 3]}" if rng.random() < 0.9 else str(rng.randint(0, 9999))
        words.append(word + rng.choices(["", ",", ".", "!", ";"], [80, 8, 8, 2, 2])[0])
    return words


def with_stalls(words: list[str], rng: random.Random) -> Reply:
    """A response in which the language model stalls at random words."""
    reply: list[str | float] = []
    starts = [0]
    while starts[-1] < len(words):
        starts.append(starts[-1] + rng.randint(*_NUM_BETWEEN_STALLS))
    for start, stop in pairwise(starts):
        reply += [" ".join(["", *words[start:stop]]), rng.uniform(*_STALL_S)]
    return reply[:-1]


def random_tokens(rng: random.Random, words_per_s: float, text: str) -> list[str]:
    """Words with the space before them; divided unless that makes a pause within a word."""
    tokens = []
    for token in re.findall(r"\s*\S+", text):
        while words_per_s > _MIN_DIVIDED_PER_S and len(token) > _MIN_DIVIDED:
            length = rng.randint(1, len(token))
            tokens.append(token[:length])
            token = token[length:]
        tokens += [token] if token else []
    return tokens


def check_responses(engine: TTS, seeds: Sequence[int]) -> None:
    """Compares what was written, spoken and committed in conversations side by side.

    Args:
        engine: Has a slot for each conversation.
        seeds: Of the responses, one for each conversation.
    """
    bots: dict[Bot, tuple[int, list[str]]] = {}
    for seed in seeds:
        rng = random.Random(seed)
        words, words_per_s = random_words(rng), rng.uniform(*_WORDS_PER_S)
        bot = Bot(
            engine,
            with_stalls(words, rng),
            word_interval_s=1 / words_per_s,
            tokenize=partial(random_tokens, rng, words_per_s),
            timeout_s=_TIMEOUT_S,
        )
        bots[bot] = seed, words
    run_conversations([*bots], Bot.reply)
    for bot, (seed, words) in bots.items():
        assert not bot.errors, seed
        assert [frame.text for frame in bot.played_of(TTSTextFrame)] == words, seed
        assert " ".join(bot.said).split() == words, seed
        numbers = words_in_audio(bot.output.pcm)  # from 0 in each segment
        assert all(after in (0, before + 1) for before, after in pairwise(numbers)), seed
        duration_s = sum(spoken_seconds(word) for word in words)
        assert bot.played_speech_s == pytest.approx(duration_s, abs=_MIN_WORD_S / 2), seed


@pytest.mark.parametrize("num_responses", [3, pytest.param(300, marks=pytest.mark.slow)])
def test_long_responses_are_committed_in_the_order_of_speech(
    engine: TTS, num_responses: int
) -> None:
    for first in range(0, num_responses, _NUM_CONCURRENT):
        check_responses(engine, range(first, min(num_responses, first + _NUM_CONCURRENT)))
