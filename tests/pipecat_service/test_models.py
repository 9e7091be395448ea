"""The service with models of every kind: small ones with random weights, on the CPU."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pipecat.frames.frames import TTSAudioRawFrame, TTSUpdateSettingsFrame

from megakernel_tts import TTS, Sampling, Voice, VoiceError
from megakernel_tts.model.config import Kind
from pipecat_service import MegakernelTTSService
from tests.pipecat_service.bot import Bot, run_conversations

SHORT = Sampling(seed=3, max_frames=6)
Settings = MegakernelTTSService.Settings


def warm(folder: Path) -> TTS:
    tts = TTS.load(folder, device="cpu", slots=2)
    asyncio.run(tts.awarmup())
    return tts


def assert_spoken(bot: Bot) -> None:
    assert not bot.errors
    assert 0 < sum(f.num_frames for f in bot.frames_of(TTSAudioRawFrame)) <= 6 * 1920 * 2
    assert bot.said == ["Hello to you, world."]


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
        bot = Bot(tts, "Hello to you, world.", settings=settings)
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


def test_a_design_without_a_description_is_refused(checkpoint: Callable[..., Path]) -> None:
    with warm(checkpoint("voice_design", "1b7")) as tts:
        with pytest.raises(VoiceError, match="needs a description"):
            MegakernelTTSService(engine=tts)


def test_the_demo_voice_speaks() -> None:
    with TTS.load() as tts:
        tts.warmup()
        bot = Bot(
            tts, "Good morning. How may I help?", settings=Settings(sampling=Sampling(seed=1))
        )
        run_conversations([bot], Bot.reply)
    assert np.abs(bot.output.pcm.astype(int)).max() > 1000
    assert bot.said == ["Good morning. How may I help?"]
