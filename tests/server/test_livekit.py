"""LiveKit's own plugins as clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from livekit.agents import APIConnectOptions, APIError, tts
from livekit.agents.types import USERDATA_TIMED_TRANSCRIPT
from livekit.plugins import cartesia, elevenlabs, openai

from bench.simulation import words_in_audio
from megakernel_tts import TTS
from tests.fakes import TIMEOUT_S
from tests.server.running import LOCKED, RunningServer, running_server, until

TEXT = "Hello there, my friend."
ONCE = APIConnectOptions(max_retry=0, timeout=TIMEOUT_S)


@asynccontextmanager
async def plugin(server: RunningServer, name: str, key: str = "none") -> AsyncIterator[tts.TTS]:
    """A plugin that uses the server."""
    async with aiohttp.ClientSession() as session:
        made: tts.TTS
        if name == "cartesia":
            made = cartesia.TTS(
                api_key=key, base_url=server.url, voice="ryan", http_session=session
            )
        elif name == "elevenlabs":
            made = elevenlabs.TTS(
                api_key=key,
                base_url=f"{server.url}/v1",
                voice_id="ryan",
                encoding="pcm_24000",
                http_session=session,
            )
        else:
            made = openai.TTS(
                api_key=key, base_url=f"{server.url}/v1", voice="ryan", response_format="pcm"
            )
        async with made:
            yield made


async def speak(plugin: tts.TTS, text: str = TEXT) -> tuple[bytes, list[tuple[str, float]]]:
    """Speaks live text: the audio, and words with their starts."""
    audio, words = b"", list[tuple[str, float]]()
    async with plugin.stream(conn_options=ONCE) as stream:
        for word in text.split(" "):
            stream.push_text(f"{word} ")
        stream.end_input()
        async for event in stream:
            audio += event.frame.data.tobytes()
            for word in event.frame.userdata[USERDATA_TIMED_TRANSCRIPT]:
                words.append((word.strip(), word.start_time))
    return audio, words


@pytest.mark.parametrize("name", ["cartesia", "elevenlabs"])
def test_livekit_gets_the_audio_and_the_words_of_the_engine(
    server: RunningServer, name: str
) -> None:
    async def run() -> tuple[bytes, list[tuple[str, float]]]:
        async with plugin(server, name) as tts:
            return await speak(tts)

    audio, words = asyncio.run(run())
    engine = server.tts.say(TEXT)
    assert words_in_audio(np.frombuffer(audio, "<i2")) == [0, 1, 2, 3]
    assert words == [(word.text, word.start) for word in engine.words]


@pytest.mark.parametrize("name", ["cartesia", "elevenlabs", "openai"])
def test_livekit_speaks_whole_texts(server: RunningServer, name: str) -> None:
    async def run() -> bytes:
        async with plugin(server, name) as tts:
            frame = await tts.synthesize(TEXT, conn_options=ONCE).collect()
            return frame.data.tobytes()

    assert words_in_audio(np.frombuffer(asyncio.run(run()), "<i2")) == [0, 1, 2, 3]


def test_an_interruption_of_livekit_stops_the_speech(server: RunningServer) -> None:
    """Cartesia's plugin closes the socket when the next reply begins.

    ElevenLabs' plugin keeps its socket, and the protocol finishes the sentences that were sent.
    """

    async def run() -> bytes:
        async with plugin(server, "cartesia") as tts:
            async with tts.stream(conn_options=ONCE) as stream:
                stream.push_text("A long reply goes on and on. " * 100)
                await asyncio.wait_for(anext(stream), TIMEOUT_S)
                assert server.num_streams == 1
            audio, _ = await speak(tts)
            await until(lambda: server.num_streams == 0)
            return audio

    aborted = server.metric('requests_success_total{finished_reason="abort"}')
    assert words_in_audio(np.frombuffer(asyncio.run(run()), "<i2")) == [0, 1, 2, 3]
    assert server.metric('requests_success_total{finished_reason="abort"}') == aborted + 1


@pytest.mark.parametrize("name", ["cartesia", "elevenlabs", "openai"])
def test_livekit_reports_an_invalid_key(engine: TTS, name: str) -> None:
    async def run(server: RunningServer) -> None:
        async with plugin(server, name, "other") as tts:
            with pytest.raises(APIError) as caught:
                if name == "openai":  # which has no live text
                    await tts.synthesize(TEXT, conn_options=ONCE).collect()
                else:
                    await speak(tts)
            assert getattr(caught.value, "status_code", 401) == 401

    with running_server(engine, LOCKED) as server:
        asyncio.run(run(server))


def test_livekit_lists_the_voices(server: RunningServer) -> None:
    async def run() -> list[str]:
        async with plugin(server, "elevenlabs") as tts:
            assert isinstance(tts, elevenlabs.TTS)
            return [voice.id for voice in await tts.list_voices()]

    assert asyncio.run(run()) == ["ryan", "serena"]
