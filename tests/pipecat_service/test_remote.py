"""The remote service and servers that fail; the other tests of this folder also run with it."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipecat.frames.frames import (
    LLMFullResponseEndFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory

from bench.simulation import simulated_tts, words_in_audio
from bench.virtual_time import run_in_virtual_time
from megakernel_tts import TTS, Voice
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.voice_library import UploadedVoice
from pipecat_service import MegakernelTTSSettings
from pipecat_service.remote import MegakernelRemoteTTSService
from tests.fakes import TIMEOUT_S
from tests.pipecat_service.agents import ROOT
from tests.pipecat_service.bot import VIRTUAL_TIMEOUT_S, Bot
from tests.pipecat_service.serving import LoopServer, local_sockets, serving, stalling_proxy
from tests.pipecat_service.test_underruns import make_engine, word_starts
from tests.server.running import LOCKED, running_server

Settings = MegakernelTTSSettings
REPLY = "One two three, four five six. Seven eight nine! Ten eleven, twelve thirteen."
WORDS = REPLY.split()


@pytest.fixture(autouse=True)
def _remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Bot, "remote", True)
    with local_sockets():
        yield


def converse(
    bot: Bot,
    drive: Callable[[LoopServer], Awaitable[None]],
    settings: ServerSettings | None = None,
    path: Path | None = None,
) -> None:
    """Runs a conversation with a server.

    Args:
        bot: The conversation.
        drive: Acts as the user; gets the server.
        settings: Of the server.
        path: Of its socket.
    """

    async def run() -> None:
        assert bot.engine is not None
        async with serving(bot.engine, settings, path) as server:
            await bot.run(lambda _: drive(server))

    run_in_virtual_time(run(), VIRTUAL_TIMEOUT_S)


async def first_audio(bot: Bot) -> None:
    """Starts a reply and waits until some of it has been spoken."""
    await bot.request_reply()
    await bot.wait_until(lambda: bot.played_speech_s >= 0.5)


@pytest.mark.contract
def test_a_server_that_ends_within_a_turn_fails_that_turn_and_no_other(
    engine: TTS, tmp_path: Path
) -> None:
    bot, path = Bot(engine, REPLY, "Still away.", "Back again."), tmp_path / "socket"

    async def drive(server: LoopServer) -> None:
        await first_audio(bot)
        path.unlink()
        server.abort()
        await bot.wait_until(lambda: bool(bot.played_of(LLMFullResponseEndFrame)))
        (lost,) = bot.errors
        assert lost.error == "The connection to the server at http://localhost was lost."
        assert lost.category is ErrorCategory.CONNECTIVITY
        await asyncio.sleep(0.3)  # the last block of audio is played after the frame
        num_spoken = len(words_in_audio(bot.output.pcm))
        assert 2 <= num_spoken < len(WORDS)
        await bot.reply()
        unreachable = bot.errors[1]
        assert unreachable.category is ErrorCategory.CONNECTIVITY
        assert "http://localhost cannot be reached" in unreachable.error
        assert bot.tts.is_usable
        bot.output.clear()
        async with serving(engine, path=path):
            await bot.reply()
        assert words_in_audio(bot.output.pcm) == [0, 1]
        assert " ".join(bot.said).split() == [*WORDS[:num_spoken], "Back", "again."]

    converse(bot, drive, path=path)


@pytest.mark.contract
def test_a_lost_connection_is_opened_again_for_the_rest_of_the_turn(engine: TTS) -> None:
    bot = Bot(engine, [REPLY, 2.0, " Fourteen fifteen."])

    async def drive(server: LoopServer) -> None:
        await first_audio(bot)
        server.abort()
        await bot.wait_until(lambda: bool(bot.played_of(LLMFullResponseEndFrame)))
        assert server.application.streams.num_open == 0

    converse(bot, drive)
    (error,) = bot.errors
    assert error.category is ErrorCategory.CONNECTIVITY
    *before, rest = " ".join(bot.said).rsplit(" Fourteen", 1)
    assert REPLY.startswith(before[0]) and rest == " fifteen."


@pytest.mark.contract
def test_a_server_that_starts_after_the_service_is_used(engine: TTS, tmp_path: Path) -> None:
    bot, path = Bot(engine, "One two.", "Three four."), tmp_path / "socket"

    async def run() -> None:
        async with serving(engine, path=path):
            path.unlink()
            await bot.run(drive)

    async def drive(_: Bot) -> None:
        await bot.reply()
        assert "cannot be reached" in bot.errors[0].error and bot.tts.is_usable
        assert bot.said == []
        async with serving(engine, path=path):
            await bot.reply()

    run_in_virtual_time(run(), VIRTUAL_TIMEOUT_S)
    assert bot.said == ["Three four."]
    settings = bot.tts.settings.given_fields()
    assert settings["model"] == "simulated" and settings["voice"] == "ryan"


@pytest.mark.contract
@pytest.mark.parametrize(
    ("keywords", "category", "sentence"),
    [
        ({}, ErrorCategory.AUTHENTICATION, "refused the API key; set api_key"),
        ({"api_key": "other"}, ErrorCategory.AUTHENTICATION, "refused the API key; set api_key"),
        (
            {"api_key": "secret", "settings": Settings(voice="nobody")},
            ErrorCategory.INVALID_REQUEST,
            "There is no voice 'nobody'; choose one of: ryan, serena.",
        ),
        (
            {"api_key": "secret", "settings": Settings(speed=3.0)},
            ErrorCategory.INVALID_REQUEST,
            "speed is 3.0",
        ),
    ],
)
def test_a_service_that_could_not_speak_is_unusable_from_the_start(
    engine: TTS, keywords: dict[str, Any], category: ErrorCategory, sentence: str
) -> None:
    bot = Bot(engine, "One two.", **keywords)

    async def drive(_: LoopServer) -> None:
        await bot.wait_until(lambda: bool(bot.errors))

    converse(bot, drive, LOCKED)
    assert sentence in bot.errors[0].error and bot.errors[0].category is category
    assert not bot.tts.is_usable


@pytest.mark.contract
def test_an_interruption_frees_the_stream_of_the_server(engine: TTS) -> None:
    bot = Bot(engine, REPLY * 5, "Next.")

    async def drive(server: LoopServer) -> None:
        streams = server.application.streams
        await first_audio(bot)
        assert streams.num_open == 1
        await bot.interrupt(settle_s=0.001)
        assert streams.num_open == 0
        assert 'requests_success_total{model_name="simulated",finished_reason="abort"} 1' in (
            streams.metrics.text()
        )
        await bot.reply()

    converse(bot, drive)
    assert bot.said[-1].endswith("Next.") and not bot.errors


@pytest.mark.contract
def test_voices_that_are_cloned_on_the_server_are_known_at_once() -> None:
    anna, ben = Voice(torch.zeros(1)), Voice(torch.ones(1))
    with simulated_tts(num_slots=2, frame_seconds=0.001, kind="base") as tts:
        tts.warmup()
        opened = tts._loaded.engine.prompt_builder.opened  # type: ignore[attr-defined]
        opened.clear()
        upload = UploadedVoice(
            name="ben", voice=ben, consent="yes", created_at=0, file_size=1, mime_type="audio/wav",
            speaker_description=None,
        )  # fmt: skip
        change = TTSUpdateSettingsFrame(delta=Settings(voice="Ben", language=Language.DE))
        bot = Bot(tts, "One two.", [change, "Drei vier."])

        async def drive(server: LoopServer) -> None:
            await bot.reply()
            await server.application.streams.library.add(upload)
            await bot.reply()

        converse(bot, drive, ServerSettings(voices={"anna": anna}))
    assert opened[0][0] is anna and opened[1][0] is ben and opened[1][1] == "german"
    assert not bot.errors


def test_words_are_committed_when_their_audio_begins_on_a_network_that_stalls() -> None:
    """The audio has gaps that the server does not know of."""
    rng = random.Random(3)
    instants = [rng.uniform(1.0, 9.0) for _ in range(12)]
    with make_engine() as engine:
        bot = Bot(engine, *[[REPLY]] * len(instants), word_interval_s=0)
        turns: list[tuple[float, list[str], np.ndarray]] = []  # barge-in, words kept, word starts

        async def run() -> None:
            async with serving(engine), stalling_proxy(rng, share=0.4):
                await bot.run(drive)

        async def drive(_: Bot) -> None:
            for instant in instants:
                num_said = len(bot.said)
                bot.output.clear()
                await bot.request_reply()
                await asyncio.sleep(instant)
                now_s = asyncio.get_running_loop().time()
                await bot.interrupt()
                said = " ".join(bot.said[num_said:]).split()
                turns.append((now_s, said, word_starts(bot.output)))
                bot.context.add_message({"role": "user", "content": "Again?"})

        run_in_virtual_time(run(), 10 * VIRTUAL_TIMEOUT_S)
    for now_s, said, starts in turns:
        assert said == WORDS[: len(said)]
        assert len(said) == np.count_nonzero(starts < now_s)
    assert not bot.errors
    gaps = [np.diff(starts).max(initial=0) for _, _, starts in turns]  # a word takes 0.5 s at most
    assert sum(gap > 0.7 for gap in gaps) >= 2, "few turns have a gap"
    assert len({len(said) for _, said, _ in turns}) >= 5, "the instants are too close to each other"


@pytest.mark.contract
@pytest.mark.parametrize(
    ("keywords", "error", "sentence"),
    [
        ({"url": "localhost:8000"}, ValueError, "must be the address of `megakernel-tts serve`"),
        ({"url": "ftp://host"}, ValueError, "must be the address"),
        ({"settings": Settings(model="demo")}, ValueError, "the server has one model"),
        ({"settings": {"voice": "ryan"}}, TypeError, "must be a MegakernelRemoteTTSService.Settin"),
        ({"engine": None}, TypeError, "MegakernelRemoteTTSService has no argument engine"),
        ({"voice": "ryan"}, TypeError, r"MegakernelRemoteTTSService.Settings\(voice=...\)"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused(
    keywords: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        MegakernelRemoteTTSService(**{"url": "http://localhost"} | keywords)  # type: ignore[arg-type]


WITHOUT_TORCH = """
import asyncio, sys

HEAVY = ("torch", "tokenizers", "safetensors", "huggingface_hub", "starlette", "uvicorn")
sys.modules |= dict.fromkeys(HEAVY)  # importing one raises an ImportError

from pipecat.frames.frames import TTSSpeakFrame, TTSTextFrame, TTSAudioRawFrame
from pipecat.tests.utils import run_test
from pipecat_service.remote import MegakernelRemoteTTSService

async def main():
    tts = MegakernelRemoteTTSService(url=sys.argv[1], sample_rate=24_000)
    frames, _ = await run_test(tts, frames_to_send=[TTSSpeakFrame("Hello there, my friend.")])
    print([frame.text for frame in frames if isinstance(frame, TTSTextFrame)])
    print(sum(frame.num_frames for frame in frames if isinstance(frame, TTSAudioRawFrame)))

asyncio.run(main())
print(sorted(name for name in sys.modules if name.startswith("megakernel_tts.engine")))
"""


@pytest.mark.contract
def test_the_service_speaks_in_a_process_without_torch(engine: TTS) -> None:
    with running_server(engine) as server:
        result = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, server.url],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        speech = server.speech()
    assert result.returncode == 0, result.stderr
    words, num_samples, modules = result.stdout.splitlines()
    assert words == "['Hello', 'there,', 'my', 'friend.']"
    assert int(num_samples) == pytest.approx(len(speech), abs=480)
    assert modules == "[]"
