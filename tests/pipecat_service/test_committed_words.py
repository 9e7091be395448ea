"""A search with random responses: the conversation holds the words that were spoken, in order."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
from pipecat.frames.frames import TTSTextFrame

from bench.simulation import SimulatedBackend, simulated_tts, words_in_audio
from megakernel_tts import TTS
from megakernel_tts.align.estimate import spoken_seconds
from tests.pipecat_service.bot import Bot, Reply, leading_spaces, run_conversations

pytestmark = pytest.mark.usefixtures("service")

NUM_CONCURRENT = 12
_NUM_WORDS = 60, 240
_NUM_WORDS_LONG = 800, 1000  # of each tenth response: 5,000 characters and more
_NUM_BETWEEN_STALLS = 4, 60  # words
_STALL_S = 0.1, 4.0  # ordinary gaps, and pauses at which speech is flushed
_WORDS_PER_S = 3, 30
_MIN_DIVIDED = 4  # characters of a word that is divided into tokens
_TIMEOUT_S = 2000.0  # virtual, of a response


def random_words(rng: random.Random, num_words: int) -> list[str]:
    """Words of all lengths that differ from their neighbours, with marks."""
    words = []
    for i in range(num_words):
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


def random_tokens(rng: random.Random, text: str) -> list[str]:
    """Words with the space before them; long ones are divided."""
    tokens = []
    for token in leading_spaces(text):
        while len(token) > _MIN_DIVIDED:
            length = rng.randint(1, len(token))
            tokens.append(token[:length])
            token = token[length:]
        tokens += [token] if token else []
    return tokens


def check_responses(engine: TTS, seeds: Sequence[int]) -> None:
    """Compares what was written, spoken and committed in conversations side by side.

    Args:
        engine: From `make_engine`.
        seeds: Of the responses, one for each conversation.
    """
    bots: dict[Bot, tuple[int, list[str]]] = {}
    for seed in seeds:
        rng = random.Random(seed)
        num_words = rng.randint(*(_NUM_WORDS if seed % 10 else _NUM_WORDS_LONG))
        words, words_per_s = random_words(rng, num_words), rng.uniform(*_WORDS_PER_S)
        bot = Bot(
            engine,
            with_stalls(words, rng),
            word_interval_s=1 / words_per_s,
            tokenize=partial(random_tokens, rng),
            timeout_s=_TIMEOUT_S,
        )
        bots[bot] = seed, words
    run_conversations([*bots], Bot.reply)
    for bot, (seed, words) in bots.items():
        assert not bot.errors, seed
        assert [frame.text for frame in bot.played_of(TTSTextFrame)] == words, seed
        assert " ".join(bot.said).split() == words, seed
        assert len(words_in_audio(bot.output.pcm)) == len(words), seed
        duration_s = sum(spoken_seconds(word) for word in words)
        assert bot.played_speech_s == pytest.approx(duration_s, rel=1e-3), seed


@contextmanager
def make_engine() -> Iterator[TTS]:
    """A model with a slot for each conversation, in whose audio all words can be counted."""
    with simulated_tts(NUM_CONCURRENT, 0.001) as tts:
        backend = tts._loaded.engine.backend
        assert isinstance(backend, SimulatedBackend)
        backend.distinct_segments = True
        tts.warmup()
        yield tts


@pytest.mark.parametrize(
    "service", ["local", pytest.param("remote", marks=pytest.mark.slow)], indirect=True
)
def test_long_responses_are_committed_in_the_order_of_speech() -> None:
    """`tests.pipecat_service.search` checks more of them, and longer ones."""
    with make_engine() as engine:
        check_responses(engine, [1, 2])
