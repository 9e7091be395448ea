"""The service with models of every kind: small ones with random weights, on the CPU."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pipecat.frames.frames import TTSAudioRawFrame, TTSTextFrame, TTSUpdateSettingsFrame
from pipecat.utils.errors import ErrorCategory

from megakernel_tts import TTS, Sampling, Voice, VoiceError
from megakernel_tts.model.config import Kind
from pipecat_service import MegakernelTTSService
from tests.pipecat_service.bot import Bot, run_conversations

SHORT = Sampling(seed=3, max_frames=6)
TEXT = "Hello to you, world."
Settings = MegakernelTTSService.Settings

pytestmark = pytest.mark.usefixtures("no_warm_up")


def warm(folder: Path) -> TTS:
    tts = TTS.load(folder, device="cpu", slots=2)
    asyncio.run(tts.awarmup())
    return tts


def assert_spoken(bot: Bot) -> None:
    """Speech that reaches its longest duration commits the words that were begun, and no others."""
    assert not bot.errors
    assert 0 < sum(f.num_frames for f in bot.frames_of(TTSAudioRawFrame)) <= 6 * 1920 * 2
    words = [frame.text for frame in bot.played_of(TTSTextFrame)]
    assert words[0] == "Hello" and words != TEXT.split()
    assert " ".join(bot.said) == " ".join(words)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("custom_voice", Settings(voice="serena", language="english", sampling=SHORT)),
        ("voice_design", Settings(instruct="A calm, low voice.", sampling=SHORT)),
    ],
)
def test_named_and_designed_voices_speak(
    checkpoint: Callable[..., Path], kind: Kind, settings: Settings
) -> None:
    size = "1b7" if kind == "voice_design" else "0b6"
    with warm(checkpoint(kind, size)) as tts:
        bot = Bot(tts, TEXT, settings=settings)
        run_conversations([bot], Bot.reply)
    assert_spoken(bot)


def test_cloned_voices_may_be_changed_within_a_turn(
    checkpoint: Callable[..., Path],
) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 128, generator=generator)
    recording = torch.randint(0, 256, (5, 16), generator=generator)
    voices = {"Anna": Voice(vectors[0]), "Bert": Voice(vectors[1], recording, "What was said.")}
    change = TTSUpdateSettingsFrame(delta=Settings(voice="bert"))
    with warm(checkpoint("base")) as tts:
        with pytest.raises(VoiceError, match="speaks with cloned voices"):
            MegakernelTTSService(engine=tts)
        reply = ["Hello to you, ", change, "world."]
        bot = Bot(tts, reply, voices=voices, settings=Settings(sampling=SHORT))
        run_conversations([bot], Bot.reply)
    assert bot.tts.settings.given_fields()["voice"] == "bert"
    assert_spoken(bot)


def test_a_cloned_voice_that_does_not_fit_the_model_is_refused_when_it_is_set(
    checkpoint: Callable[..., Path],
) -> None:
    long = torch.zeros(2047, 16, dtype=torch.int64)
    cases = {
        "x-vector": (Voice(torch.zeros(64)), "x-vector has 64 values and this model needs 128"),
        "codes": (Voice(torch.zeros(128), long[:5] + 9999, "Hi."), "not those of this model"),
        "groups": (Voice(torch.zeros(128), long[:5, :8], "Hi."), "not those of this model"),
        "length": (Voice(torch.zeros(128), long, "Hi."), "positions"),
    }
    voices = {"good": Voice(torch.zeros(128))} | {name: voice for name, (voice, _) in cases.items()}
    with warm(checkpoint("base")) as tts:
        for name, (_, sentence) in cases.items():
            with pytest.raises(VoiceError, match=sentence):
                MegakernelTTSService(engine=tts, voices=voices, settings=Settings(voice=name))
        changes = [TTSUpdateSettingsFrame(delta=Settings(voice=name)) for name in cases]
        bot = Bot(tts, [*changes, TEXT], voices=voices, settings=Settings(sampling=SHORT))
        run_conversations([bot], Bot.reply)
    for error, (_, sentence) in zip(bot.errors, cases.values(), strict=True):
        assert error.category is ErrorCategory.APPLICATION and sentence in error.error
    assert bot.tts.is_usable and bot.tts.settings.given_fields()["voice"] == "good"
    assert bot.played_of(TTSTextFrame)


def test_an_instruction_that_does_not_fit_a_slot_is_refused_when_it_is_set(
    checkpoint: Callable[..., Path],
) -> None:
    long, settings = "calm and low " * 5000, Settings(instruct="A calm voice.", sampling=SHORT)
    with warm(checkpoint("voice_design", "1b7")) as tts:
        with pytest.raises(VoiceError, match="instruction has"):
            MegakernelTTSService(engine=tts, settings=Settings(instruct=long))
        change = TTSUpdateSettingsFrame(delta=Settings(instruct=long))
        bot = Bot(tts, [change, TEXT], settings=settings)
        run_conversations([bot], Bot.reply)
    assert ["instruction has" in error.error for error in bot.errors] == [True]
    assert bot.tts.settings.given_fields()["instruct"] == "A calm voice."
    assert bot.played_of(TTSTextFrame)


def test_a_design_without_a_description_is_refused(checkpoint: Callable[..., Path]) -> None:
    with warm(checkpoint("voice_design", "1b7")) as tts:
        with pytest.raises(VoiceError, match="needs a description"):
            MegakernelTTSService(engine=tts)


def test_the_demo_voice_speaks(demo: TTS) -> None:
    settings = Settings(sampling=Sampling(seed=1))
    bot = Bot(demo, "Good morning. How may I help?", settings=settings)
    run_conversations([bot], Bot.reply)
    assert np.abs(bot.output.pcm.astype(int)).max() > 1000
    assert bot.said == ["Good morning. How may I help?"]
