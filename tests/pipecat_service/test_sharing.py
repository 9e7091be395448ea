"""Services that share an engine, and engines that fail."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger
from pipecat.frames.frames import (
    CancelFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    TTSAudioRawFrame,
    TTSStartedFrame,
)
from pipecat.metrics.metrics import TTFAMetricsData
from pipecat.utils.errors import ErrorCategory

from bench.running_server import wait_until
from bench.simulation import simulated_tts, words_in_audio
from megakernel_tts import TTS, Sampling, Session, Voice
from megakernel_tts.engine.delivery import Delivery
from megakernel_tts.session import FinishReason
from pipecat_service import MegakernelTTSService, SlotWaitMetricsData
from pipecat_service.contexts import ContextState
from tests.fakes import TIMEOUT_S
from tests.pipecat_service.bot import Bot, run_conversations

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("service")]

LONG = "One two three four five six seven eight nine ten. " * 2


@pytest.fixture
def own_engine(request: pytest.FixtureRequest) -> Iterator[TTS]:
    """An engine that a test may break; its parameter is the kind of the model."""
    kind = "base" if getattr(request, "param", "") == "base" else "custom_voice"
    with simulated_tts(num_slots=2, frame_seconds=0.001, kind=kind) as tts:
        tts.warmup()
        yield tts


def test_an_interruption_leaves_no_gap_in_another_conversation(engine: TTS) -> None:
    cut, whole = Bot(engine, LONG), Bot(engine, LONG)

    async def drive(bot: Bot) -> None:
        if bot is whole:
            await bot.reply()
            return
        await bot.request_reply()
        for _ in range(3):
            await bot.wait_until(lambda: bool(bot.output.chunks))
            await asyncio.sleep(0.3)
            await bot.interrupt(settle_s=0)

    run_conversations([cut, whole], drive)
    assert words_in_audio(whole.output.pcm) == list(range(20))
    assert " ".join(whole.said) == LONG.strip()
    assert len(words_in_audio(cut.output.pcm)) < 5
    # Speech is chunks of 40 ms without gaps; a gap would delay all later chunks.
    starts = np.array([start for start, _ in whole.output.chunks])
    delays = starts - starts[0] - 0.04 * np.arange(len(starts))
    assert delays.max() < 1e-6


def test_a_failure_within_a_turn_keeps_the_words_spoken_before(own_engine: TTS) -> None:
    own_engine._loaded.engine.backend.failing_word = "poison"  # type: ignore[attr-defined]
    failing = Bot(own_engine, "One two three poison.", "Six seven.")
    other = Bot(own_engine, "One two three four five six.")

    async def drive(bot: Bot) -> None:
        await bot.reply()
        if bot is failing:
            await bot.reply()

    run_conversations([failing, other], drive)
    assert "poison cannot be spoken" in failing.errors[0].error
    assert failing.errors[0].category is ErrorCategory.SERVER
    assert failing.tts.is_usable
    assert " ".join(failing.said) == "One two three Six seven."
    assert words_in_audio(failing.output.pcm) == [0, 1, 2, 0, 1]
    assert other.said == ["One two three four five six."] and not other.errors


def test_silence_before_speech_is_not_sent(own_engine: TTS) -> None:
    own_engine._loaded.engine.backend.num_silent_intervals = 12  # type: ignore[attr-defined]
    bot = Bot(own_engine, "One two three.")
    run_conversations([bot], Bot.reply)
    (onset,) = bot.metrics(TTFAMetricsData)
    assert onset.leading_silence < 0.01
    assert words_in_audio(bot.output.pcm) == [0, 1, 2] and bot.said == ["One two three."]


def test_silent_speech_is_no_error_and_its_text_is_not_committed(own_engine: TTS) -> None:
    """Pipecat disables a service after three turns without audio."""
    own_engine._loaded.engine.decoder._wave.zero_()  # type: ignore[attr-defined]
    bot = Bot(own_engine, *["One two."] * 3)

    async def drive(bot: Bot) -> None:
        for _ in range(3):
            await bot.reply()

    run_conversations([bot], drive)
    assert not bot.errors and bot.tts.is_usable
    assert not bot.said


@pytest.mark.parametrize("reason", ["length", "guard"])
def test_words_after_the_end_of_speech_that_was_cut_off_are_not_committed(
    engine: TTS, monkeypatch: pytest.MonkeyPatch, reason: FinishReason
) -> None:
    finish = Delivery.finish

    def finish_as(delivery: Delivery, given: FinishReason, error: BaseException | None) -> None:
        finish(delivery, reason if given == "length" else given, error)

    monkeypatch.setattr(Delivery, "finish", finish_as)
    sampling = Sampling(max_frames=10)
    bot = Bot(engine, LONG, "More.", settings=MegakernelTTSService.Settings(sampling=sampling))

    async def drive(bot: Bot) -> None:
        await bot.reply()
        await bot.reply()

    run_conversations([bot], drive)
    num_words = len(words_in_audio(bot.output.pcm)) - 1
    assert 1 < num_words < 5
    assert " ".join(bot.said).split() == [*LONG.split()[:num_words], "More."]
    assert not bot.errors


@pytest.mark.parametrize("service", ["local"], indirect=True)
@pytest.mark.parametrize("own_engine", ["base"], indirect=True)
def test_an_interruption_while_a_cloned_voice_is_prepared_leaves_no_session(
    own_engine: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop: list[asyncio.AbstractEventLoop] = []
    entered, opened = asyncio.Event(), asyncio.Event()
    proceed = threading.Event()

    def open_late(*args: Any, **keywords: Any) -> Session:
        loop[0].call_soon_threadsafe(entered.set)
        assert proceed.wait(TIMEOUT_S)
        loop[0].call_soon_threadsafe(opened.set)
        return TTS.open(own_engine, *args, **keywords)

    monkeypatch.setattr(own_engine, "open", open_late)
    bot = Bot(own_engine, LONG, voices={"anna": Voice(torch.zeros(1))})

    async def drive(bot: Bot) -> None:
        loop.append(asyncio.get_running_loop())
        await bot.request_reply()
        await entered.wait()
        await bot.worker.queue_frame(InterruptionFrame())
        await bot.wait_until(lambda: bool(bot.played_of(InterruptionFrame)))
        proceed.set()
        await opened.wait()
        # The job's thread drops the session after the job has ended.
        await asyncio.to_thread(wait_until, lambda: not own_engine._loaded.engine.num_sessions)

    num_frames_before = own_engine._loaded.engine.backend.num_made  # type: ignore[attr-defined]
    run_conversations([bot], drive)
    assert bot.said == [] and len(bot.output.pcm) == 0
    num_frames = own_engine._loaded.engine.backend.num_made  # type: ignore[attr-defined]
    assert num_frames == num_frames_before


def test_waiting_for_a_slot_is_logged_and_measured(own_engine: TTS) -> None:
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    bots = [Bot(own_engine, LONG) for _ in range(3)]  # one more than slots
    run_conversations(bots, Bot.reply)
    logger.remove(handler)
    (line,) = [line for line in lines if "slots were in use" in line]
    (wait,) = [data for bot in bots for data in bot.metrics(SlotWaitMetricsData)]
    assert wait.model == "simulated" and wait.processor in line and wait.value > 0
    assert f"waited {wait.value:.3f} s" in line
    assert all(bot.said == [LONG.strip()] and not bot.errors for bot in bots)


@pytest.mark.parametrize("service", ["local"], indirect=True)
@pytest.mark.parametrize("end", ["interruption", "failure", "cancellation"])
def test_the_waiting_time_of_a_turn_that_never_speaks_is_reported(
    own_engine: TTS, end: str
) -> None:
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    waiting, *speaking = bots = [Bot(own_engine, LONG) for _ in range(3)]
    speak, wait = asyncio.Event(), asyncio.Event()

    async def drive(bot: Bot) -> None:
        if bot is not waiting:
            await bot.request_reply()
            await bot.wait_until(lambda: bool(bot.frames_of(TTSAudioRawFrame)))
            if all(bot.frames_of(TTSAudioRawFrame) for bot in speaking):
                speak.set()
            await wait.wait()
            return
        await speak.wait()
        await bot.request_reply()
        await bot.wait_until(lambda: bool(bot.frames_of(TTSStartedFrame)))
        (context,) = waiting.tts._contexts.values()
        await asyncio.to_thread(wait_until, lambda: waits_for_a_slot(context))
        if end == "interruption":
            await bot.interrupt()
        elif end == "failure":
            own_engine.close()
            await bot.wait_until(lambda: bool(bot.errors))
        else:
            await bot.worker.queue_frame(CancelFrame())
            await asyncio.sleep(0.3)
        wait.set()

    def waits_for_a_slot(context: ContextState) -> bool:
        return bool(context.speech and context.speech.session.slot_wait_s)

    run_conversations(bots, drive)
    logger.remove(handler)
    (line,) = [line for line in lines if "slots were in use" in line]
    assert waiting.tts.name in line
    if end != "cancellation":  # after which a pipeline passes no frame on
        assert len(waiting.metrics(SlotWaitMetricsData)) == 1


@pytest.mark.parametrize("service", ["local"], indirect=True)
def test_closing_the_engine_is_a_permanent_error(own_engine: TTS) -> None:
    bot = Bot(own_engine, LONG, "More.")

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bool(bot.frames_of(TTSAudioRawFrame)))
        own_engine.close()
        await bot.wait_until(lambda: bool(bot.played_of(LLMFullResponseEndFrame)))

    run_conversations([bot], drive)
    assert "closed" in bot.errors[0].error
    assert not bot.tts.is_usable


def test_a_full_engine_is_a_temporary_error(own_engine: TTS) -> None:
    engine = own_engine._loaded.engine
    long = "One two, three four, five six, seven eight, nine ten."
    bot = Bot(own_engine, long, "Three four.")

    async def drive(bot: Bot) -> None:
        taken = [own_engine.open() for _ in range(engine._max_sessions)]
        await bot.reply()
        for session in taken:
            session.cancel()
        await bot.reply()

    run_conversations([bot], drive)
    assert bot.errors[0].category is ErrorCategory.RATE_LIMIT
    assert [e.error.split()[-1] for e in bot.errors[1:]] == ["audio"], "one attempt a turn"
    assert bot.tts.is_usable
    assert " ".join(bot.said) == "Three four."
