import asyncio
from itertools import groupby

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pipecat.frames.frames import (
    AggregatedTextFrame,
    CancelFrame,
    EndFrame,
    Frame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    TextFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
    TTSTextFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.metrics.metrics import (
    ProcessingMetricsData,
    TextAggregationMetricsData,
    TTFAMetricsData,
    TTFBMetricsData,
    TTSUsageMetricsData,
)
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory

from bench.simulation import words_in_audio
from megakernel_tts import TTS, Voice
from pipecat_service import MegakernelTTSService
from tests.pipecat_service.bot import Bot, run_conversations

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("service")]

Settings = MegakernelTTSService.Settings
GROUPS = ["One two", "three four.", "Five six."]  # as they are passed to the engine


def opened_sessions(engine: TTS) -> list[tuple[str | Voice | None, str, str | None]]:
    """Voice, language and instruction of each session."""
    return engine._loaded.engine.prompt_builder.opened  # type: ignore[attr-defined]


def kinds(frames: list[Frame]) -> list[type[Frame]]:
    """Kinds of a turn's frames; consecutive frames of a kind count as one."""
    selected = (
        LLMFullResponseStartFrame, LLMFullResponseEndFrame,
        TTSStartedFrame, TTSAudioRawFrame, TTSStoppedFrame,
    )  # fmt: skip
    return [kind for kind, _ in groupby(type(f) for f in frames if isinstance(f, selected))]


def test_frames_of_a_turn_are_in_order(engine: TTS) -> None:
    bot = Bot(engine, "One two three. Four five.")
    run_conversations([bot], Bot.reply)
    assert kinds(bot.sent) == [
        LLMFullResponseStartFrame,
        TTSStartedFrame,
        TTSAudioRawFrame,
        TTSStoppedFrame,
        LLMFullResponseEndFrame,
    ]
    contexts = {frame.context_id for frame in bot.frames_of(TTSAudioRawFrame)}
    assert len(contexts) == 1 and None not in contexts
    words = [frame.text for frame in bot.frames_of(TTSTextFrame)]
    assert words == ["One", "two", "three.", "Four", "five."]
    assert bot.said == ["One two three. Four five."]
    assert words_in_audio(bot.output.pcm) == [0, 1, 2, 3, 4]
    assert not bot.errors


def test_speech_begins_before_the_text_is_complete(engine: TTS) -> None:
    bot = Bot(engine, "Word after word " * 3 + "end.", word_interval_s=0.05)
    run_conversations([bot], Bot.reply)
    order = [type(frame) for frame in bot.sent]
    texts = [i for i, kind in enumerate(order) if kind is AggregatedTextFrame]
    assert order.index(TTSAudioRawFrame) < texts[2]
    assert words_in_audio(bot.output.pcm) == list(range(10))


def test_each_turn_is_one_session(engine: TTS) -> None:
    before = len(opened_sessions(engine))
    bot = Bot(engine, "One. Two! Three?", "Four.")

    async def drive(bot: Bot) -> None:
        for _ in range(2):
            await bot.reply()

    run_conversations([bot], drive)
    assert len(opened_sessions(engine)) == before + 2
    assert bot.said == ["One. Two! Three?", "Four."] or bot.said == ["One. Two! Three? Four."]
    assert len(bot.frames_of(TTSStartedFrame)) == len(bot.frames_of(TTSStoppedFrame)) == 2


@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000])
def test_audio_has_the_pipelines_sample_rate(engine: TTS, rate: int) -> None:
    bots = [Bot(engine, "One two three four five.", rate=r) for r in (rate, 24_000)]
    run_conversations(bots, Bot.reply)
    converted, native = (
        np.concatenate([np.frombuffer(f.audio, np.int16) for f in bot.frames_of(TTSAudioRawFrame)])
        for bot in bots
    )
    assert all(f.sample_rate == rate for f in bots[0].frames_of(TTSAudioRawFrame))
    assert abs(len(converted) / rate - len(native) / 24_000) < 0.001
    # No chunk border is audible: the tone keeps its loudness.
    part = rate // 100
    loudness = np.abs(converted[: len(converted) // part * part].astype(int))
    means = loudness.reshape(-1, part).mean(axis=1)
    assert means[2:-8].min() > 0.7 * np.median(means)


def test_three_turns_without_words_do_not_end_the_service(engine: TTS) -> None:
    sessions = len(opened_sessions(engine))
    bot = Bot(engine, "...", "👍", "?! –", "Still here.")

    async def drive(bot: Bot) -> None:
        for _ in range(4):
            await bot.reply()

    run_conversations([bot], drive)
    assert not bot.errors and bot.tts.is_usable
    assert len(opened_sessions(engine)) == sessions + 1, "punctuation opened a session"
    assert words_in_audio(bot.output.pcm) == [0, 1]
    assert bot.said[-1].endswith("Still here.")
    silent = bot.frames_of(TTSAudioRawFrame)[:3]
    assert all(0 < f.num_frames <= 1200 and not any(f.audio) for f in silent)  # type: ignore[attr-defined]


def test_settings_may_change_within_a_turn(engine: TTS) -> None:
    before = len(opened_sessions(engine))
    change = TTSUpdateSettingsFrame(
        delta=Settings(voice="serena", language=Language.DE_AT, instruct="Calmly.")
    )
    bot = Bot(engine, ["One two three.", change, "Vier fünf sechs."])
    run_conversations([bot], Bot.reply)
    first, second = opened_sessions(engine)[before:]
    assert first == ("ryan", "auto", None) and second == ("serena", "german", "Calmly.")
    assert bot.said == ["One two three. Vier fünf sechs."]
    assert words_in_audio(bot.output.pcm) == [0, 1, 2, 0, 1, 2]
    assert kinds(bot.sent).count(TTSStoppedFrame) == 2
    words = {f.text: f.pts or 0 for f in bot.frames_of(TTSTextFrame)}
    # The words of the second context are timed from the start of its audio.
    assert 0.68 < (words["Vier"] - words["One"]) / 1e9 < 0.95


def test_settings_equal_to_the_current_ones_keep_the_session(engine: TTS) -> None:
    before = len(opened_sessions(engine))
    change = TTSUpdateSettingsFrame(delta=Settings(voice="ryan"))
    bot = Bot(engine, ["One two.", change, "Three four."])
    run_conversations([bot], Bot.reply)
    assert len(opened_sessions(engine)) == before + 1
    assert bot.said == ["One two. Three four."]


def test_invalid_settings_are_refused_and_the_previous_ones_kept(engine: TTS) -> None:
    before = len(opened_sessions(engine))
    bad = [
        TTSUpdateSettingsFrame(delta=Settings(voice="unknown", language=Language.DE)),
        TTSUpdateSettingsFrame(delta=Settings(sampling="greedy")),  # type: ignore[arg-type]
        TTSUpdateSettingsFrame(delta=Settings(model="another-model")),
        TTSUpdateSettingsFrame(delta=Settings(language="klingon")),
    ]
    bot = Bot(engine, [*bad, "One two."], ["Three four."])

    async def drive(bot: Bot) -> None:
        await bot.reply()
        await bot.reply()

    run_conversations([bot], drive)
    assert [error.category for error in bot.errors] == [ErrorCategory.APPLICATION] * 2
    assert "unknown" in bot.errors[0].error and "greedy" in bot.errors[1].error
    assert bot.tts.is_usable and bot.tts.settings.model == "simulated"
    assert opened_sessions(engine)[before:] == [("ryan", "auto", None)] * 2
    assert " ".join(bot.said) == "One two. Three four."


def test_a_change_of_the_voice_may_change_the_language(engine: TTS) -> None:
    """The language is one that the new voice has."""
    change = TTSUpdateSettingsFrame(delta=Settings(language=Language.DE_CH))
    again = TTSUpdateSettingsFrame(delta=Settings(language="german", voice="ryan"))
    before = len(opened_sessions(engine))
    bot = Bot(engine, ["One two.", change, "Drei vier. ", again, "Fünf sechs."])
    run_conversations([bot], Bot.reply)
    assert [language for _, language, _ in opened_sessions(engine)[before:]] == ["auto", "german"]


def test_text_that_is_not_spoken_is_not_committed(engine: TTS) -> None:
    """Pipecat gives no text to a service that is unusable, but ends its turns."""
    bot = Bot(engine, "One two three.", "Four five.")

    async def drive(bot: Bot) -> None:
        await bot.tts.set_usable(False)
        await bot.reply()
        assert bot.said == []
        await bot.tts.set_usable(True)
        await bot.reply()

    run_conversations([bot], drive)
    assert bot.said == ["Four five."]


def test_metrics_are_reported(engine: TTS) -> None:
    bot = Bot(engine, " ".join(GROUPS))
    run_conversations([bot], Bot.reply)
    (first_audible,) = bot.metrics(TTFAMetricsData)
    assert first_audible.leading_silence < 0.01
    # Pipecat reports a zero of every processor at the start.
    spoken = [m for m in bot.metrics(TTFBMetricsData) if m.model == "simulated"]
    assert len(spoken) == 1
    assert sum(m.value for m in bot.metrics(TTSUsageMetricsData)) == len("".join(GROUPS))
    assert bot.metrics(TextAggregationMetricsData)
    assert not [m for m in bot.metrics(ProcessingMetricsData) if m.model == spoken[0].model]


def test_a_speak_frame_is_spoken_and_added_to_the_conversation(engine: TTS) -> None:
    bot = Bot(engine)

    async def drive(bot: Bot) -> None:
        await bot.worker.queue_frame(TTSSpeakFrame("Hello there, caller."))
        await bot.wait_until(lambda: bool(bot.played_of(TTSStoppedFrame)))

    run_conversations([bot], drive)
    assert bot.said == ["Hello there, caller."]


def test_text_outside_a_turn_is_spoken_and_its_session_ends(engine: TTS) -> None:
    bot = Bot(engine)
    sessions = engine._loaded.engine

    async def drive(bot: Bot) -> None:
        await bot.worker.queue_frame(TextFrame("Hello there, caller. "))
        await bot.wait_until(lambda: len(bot.frames_of(TTSStoppedFrame)) == 2)
        assert sessions.num_sessions == 0

    run_conversations([bot], drive)
    assert words_in_audio(bot.output.pcm) == [0, 1, 0]


def test_text_transforms_apply_to_speech_and_not_to_the_conversation(engine: TTS) -> None:
    async def spell(text: str, _: str) -> str:
        return text.replace("€5", "five euros")

    bot = Bot(engine, "That is €5 please.", text_transforms=[("*", spell)])
    run_conversations([bot], Bot.reply)
    assert words_in_audio(bot.output.pcm) == [0, 1, 2, 3, 4]
    assert bot.said == ["That is €5 please."]


def test_an_end_frame_waits_for_the_end_of_speech(engine: TTS) -> None:
    bot = Bot(engine, "One two three four five.")

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bool(bot.frames_of(TTSAudioRawFrame)))

    run_conversations([bot], drive)
    assert words_in_audio(bot.output.pcm) == [0, 1, 2, 3, 4]
    assert bot.played_of(EndFrame)


def test_a_cancel_frame_stops_the_engine(engine: TTS) -> None:
    bot = Bot(engine, "One two three four five six seven eight nine ten.")
    sessions = engine._loaded.engine

    async def drive(bot: Bot) -> None:
        await bot.request_reply()
        await bot.wait_until(lambda: bool(bot.frames_of(TTSAudioRawFrame)))
        assert sessions.num_sessions == 1
        await bot.worker.queue_frame(CancelFrame())
        await asyncio.sleep(0.001)
        assert sessions.num_sessions == 0

    run_conversations([bot], drive, end=False)
    assert len(words_in_audio(bot.output.pcm)) < 5
    assert sessions.num_free_slots == sessions.backend.num_slots


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Keeps the spans of this process, which may set one provider only."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def test_a_traced_turn_is_one_span_with_its_metrics(
    engine: TTS, exporter: InMemorySpanExporter
) -> None:
    exporter.clear()
    bot = Bot(engine, " ".join(GROUPS), tracing=True)
    run_conversations([bot], Bot.reply)
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "tts"]
    attributes = dict(span.attributes or {})
    assert attributes["voice_id"] == "ryan"
    assert attributes["gen_ai.request.model"] == "simulated"
    assert attributes["text"] == " ".join(GROUPS)
    assert attributes["metrics.character_count"] == len("".join(GROUPS))
    (ttfb,) = [m for m in bot.metrics(TTFBMetricsData) if m.model == "simulated"]
    assert attributes["metrics.ttfb"] == pytest.approx(ttfb.value)
