"""Many services on one engine, and an engine that misbehaves."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pipecat.frames.frames import (
    TTSAudioRawFrame,
)
from pipecat.metrics.metrics import TTFAMetricsData
from pipecat.utils.errors import ErrorCategory

from bench.simulation import heard_words, simulated_tts
from megakernel_tts import TTS, Session, Voice
from tests.pipecat_service.bot import Bot, hold

LONG = "One two three four five six seven eight nine ten. " * 2


@pytest.fixture
def own() -> Iterator[TTS]:
    """An engine that a test may break."""
    with simulated_tts(num_slots=2) as tts:
        tts.warmup()
        yield tts


def test_one_is_interrupted_while_the_other_speaks_without_a_gap(engine: TTS) -> None:
    cut, whole = Bot(engine, LONG), Bot(engine, LONG)

    async def drive(bot: Bot) -> None:
        await bot.ask()
        if bot is whole:
            await bot.replies(1)
            return
        for _ in range(3):
            await bot.until(lambda: bool(bot.output.chunks))
            await asyncio.sleep(0.3)
            await bot.interrupt()

    hold([cut, whole], drive)
    assert heard_words(whole.output.pcm) == list(range(20))
    assert " ".join(whole.said) == LONG.strip()
    assert len(heard_words(cut.output.pcm)) < 5
    # Speech is 40 ms pieces back to back; a gap would delay all pieces after it.
    begins = np.array([begin for begin, _ in whole.output.chunks])
    late = begins - begins[0] - 0.04 * np.arange(len(begins))
    assert late.max() < 0.1


def test_a_failure_in_the_middle_of_a_turn_leaves_what_was_heard(own: TTS) -> None:
    own._loaded.engine.backend.poison = "poison"  # type: ignore[attr-defined]
    failing = Bot(own, "One two three poison four five.", "Six seven.")
    other = Bot(own, "One two three four five six.")

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await bot.replies(1)
        if bot is failing:
            await bot.ask()
            await bot.replies(2)

    hold([failing, other], drive)
    assert "no poison can be said" in failing.errors[0].error
    assert failing.errors[0].category is ErrorCategory.SERVER
    assert failing.tts.is_usable
    assert " ".join(failing.said) == "One two three Six seven."
    assert heard_words(failing.output.pcm) == [0, 1, 2, 0, 1]
    assert other.said == ["One two three four five six."] and not other.errors


def test_silence_before_speech_is_not_sent(own: TTS) -> None:
    own._loaded.engine.backend.breath = 12  # type: ignore[attr-defined]
    bot = Bot(own, "One two three.")

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await bot.replies(1)

    hold([bot], drive)
    (onset,) = bot.metrics(TTFAMetricsData)
    assert onset.leading_silence < 0.01
    assert heard_words(bot.output.pcm) == [0, 1, 2] and bot.said == ["One two three."]


def test_speech_that_cannot_be_heard_is_no_fault(own: TTS) -> None:
    """Three turns without audio would end the service."""
    own._loaded.engine.decoder._wave.zero_()  # type: ignore[attr-defined]
    bot = Bot(own, *["One two."] * 3)

    async def drive(bot: Bot) -> None:
        for turn in (1, 2, 3):
            await bot.ask()
            await bot.replies(turn)

    hold([bot], drive)
    assert not bot.errors and bot.tts.is_usable
    assert " ".join(bot.said) == "One two. One two. One two."


def test_an_interruption_while_a_cloned_voice_is_prepared_leaves_no_session_behind(
    own: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[None] = []

    def slowly(*args: Any) -> Session:
        time.sleep(0.3)
        opened.append(None)
        return TTS.open(own, *args)

    monkeypatch.setattr(own, "open", slowly)
    bot = Bot(own, LONG)
    bot.tts._synthesizer.cloned[str(bot.tts._settings.voice)] = Voice(torch.zeros(1))

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await asyncio.sleep(0.15)
        await bot.interrupt()
        await bot.until(lambda: bool(opened))
        await asyncio.sleep(0.2)
        assert own._loaded.engine.num_sessions == 0

    before = own._loaded.engine.backend.made  # type: ignore[attr-defined]
    hold([bot], drive)
    assert bot.said == [] and len(bot.output.pcm) == 0
    assert own._loaded.engine.backend.made == before  # type: ignore[attr-defined]


def test_an_engine_that_closes_is_a_permanent_error(own: TTS) -> None:
    bot = Bot(own, LONG, "More.")

    async def drive(bot: Bot) -> None:
        await bot.ask()
        await bot.until(lambda: bool(bot.of(TTSAudioRawFrame)))
        own.close()
        await bot.replies(1)

    hold([bot], drive)
    assert "closed" in bot.errors[0].error
    assert not bot.tts.is_usable


def test_a_full_engine_is_a_passing_error(own: TTS) -> None:
    engine = own._loaded.engine
    long = "One two, three four, five six, seven eight, nine ten."
    bot = Bot(own, long, "Three four.")

    async def drive(bot: Bot) -> None:
        taken = [own.open() for _ in range(engine._most)]
        await bot.ask()
        await bot.replies(1)
        for session in taken:
            session.cancel()
        await bot.ask()
        await bot.replies(2)

    hold([bot], drive)
    assert bot.errors[0].category is ErrorCategory.RATE_LIMIT
    assert [e.error.split()[-1] for e in bot.errors[1:]] == ["audio"], "one attempt a turn"
    assert bot.tts.is_usable
    assert " ".join(bot.said) == "Three four."
