import asyncio
import json

import httpx
import numpy as np
from cartesia import AsyncCartesia, Cartesia

from tests.server.running import TEXT, RunningServer, words_of

PCM = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24_000}
REQUEST = {"model_id": "sonic-3", "transcript": TEXT, "voice": {"mode": "id", "id": "ryan"}}


def test_bytes_are_the_audio_of_the_engine(server: RunningServer) -> None:
    reply = httpx.post(f"{server.url}/tts/bytes", json=REQUEST | {"output_format": PCM})
    assert reply.headers["content-type"] == "application/octet-stream"
    assert np.array_equal(np.frombuffer(reply.content, "<i2"), server.speech())


def test_the_cartesia_client_reads_wav(server: RunningServer) -> None:
    client = Cartesia(api_key="none", base_url=server.url)
    reply = client.tts.generate(
        model_id="sonic-3",
        transcript=TEXT,
        voice={"mode": "id", "id": "ryan"},
        output_format={"container": "wav", "encoding": "pcm_s16le", "sample_rate": 24_000},
    )
    data = reply.read()
    assert data[:4] == b"RIFF"
    assert np.array_equal(np.frombuffer(data[44:], "<i2"), server.speech())


def test_events_are_words_audio_and_done(server: RunningServer) -> None:
    body = REQUEST | {"output_format": PCM, "add_timestamps": True}
    reply = httpx.post(f"{server.url}/tts/sse", json=body)
    names = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
    data = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert names == [event["type"] for event in data]
    assert names[0] == "timestamps" and names[-1] == "done"
    assert words_of(data) == [(word.text, word.start) for word in server.tts.say(TEXT).words]


def test_errors_have_cartesias_format(server: RunningServer) -> None:
    body = REQUEST | {"output_format": PCM | {"sample_rate": 1}}
    reply = httpx.post(f"{server.url}/tts/bytes", json=body)
    assert reply.status_code == reply.json()["status_code"] == 400
    assert reply.json()["error_code"] == "invalid_value"
    assert httpx.get(f"{server.url}/tts/nothing").json()["status_code"] == 404


def test_the_cartesia_client_speaks_over_a_socket(server: RunningServer) -> None:
    async def speak() -> tuple[bytes, list[tuple[str, float]]]:
        client = AsyncCartesia(
            api_key="none", base_url=server.url, websocket_base_url=f"ws://{server.authority}"
        )
        audio, words = b"", list[tuple[str, float]]()
        async with client.tts.websocket_connect() as connection:
            context = connection.context(
                model_id="sonic-3",
                voice={"mode": "id", "id": "ryan"},
                output_format={"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24_000},
                add_timestamps=True,
            )
            await context.push("Hello there, ")
            await context.push("my friend.")
            await context.no_more_inputs()
            async for event in context.receive():
                if event.type == "chunk":
                    audio += event.audio or b""
                elif event.type == "timestamps" and event.word_timestamps is not None:
                    times = event.word_timestamps
                    words += zip(times.words, times.start, strict=True)
        await client.close()
        return audio, words

    audio, words = asyncio.run(speak())
    assert np.array_equal(np.frombuffer(audio, "<i2"), server.speech())
    assert words == [(word.text, word.start) for word in server.tts.say(TEXT).words]
