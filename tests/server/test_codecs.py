import asyncio
import base64
import json
import subprocess
import sys
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from openai import OpenAI

from megakernel_tts.server import codecs
from megakernel_tts.server.codecs import Codec, CodecEncoder
from megakernel_tts.server.encoding import SAMPLE_RATES, AudioEncoder, AudioFormat
from megakernel_tts.server.errors import RequestError
from tests.server.decoding import RATE, assert_same_audio, decoded
from tests.server.running import TEXT, RunningServer, wait_until

FRAME = 1920  # samples
MEDIA_TYPES: dict[Codec, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
}


def voiced(seconds: float) -> NDArray[np.int16]:
    """A sound like a vowel: harmonics of a gliding pitch, and a little noise."""
    time_s = np.arange(round(seconds * RATE)) / RATE
    phase = 2 * np.pi * (120 * time_s + 15 * time_s**2)
    wave = sum(np.sin(k * phase) / k for k in range(1, 12))
    wave = wave + np.random.default_rng(0).normal(size=len(time_s)) * 0.02
    return np.rint(5000 * wave).astype(np.int16)


def chunked(codec: Codec, pcm: NDArray[np.int16], size: int, rate: int = RATE) -> list[bytes]:
    """A stream's parts, the end of the file included."""
    encoder = AudioEncoder(AudioFormat(codec, rate))
    parts = [encoder.encode(pcm[start : start + size]) for start in range(0, len(pcm), size)]
    return [*parts, encoder.end()]


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_chunks_of_any_size_concatenate_to_the_same_file(codec: Codec) -> None:
    pcm = voiced(1.0)
    whole = b"".join(chunked(codec, pcm, len(pcm)))
    for size in (FRAME, 777, 4 * FRAME):
        assert b"".join(chunked(codec, pcm, size)) == whole
    assert_same_audio(whole, pcm)


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_bytes_of_a_frame_leave_with_it_or_with_the_next_one(codec: Codec) -> None:
    *parts, _ = chunked(codec, voiced(0.96), FRAME)
    assert bool(parts[0]) == (codec != "aac")  # whose encoder reads one of its frames ahead
    assert all(parts[1:])
    # What has left after each frame is decoded at least up to a frame and a codec's delay before.
    for num_frames in (3, 8):
        wave = decoded(b"".join(parts[:num_frames]))
        assert len(wave) >= (num_frames - 2) * FRAME


@pytest.mark.parametrize("codec", codecs.NAMES)
@pytest.mark.parametrize("rate", [8_000, 48_000])
def test_sample_rates_keep_the_audio(codec: Codec, rate: int) -> None:
    pcm = voiced(0.5)
    assert_same_audio(b"".join(chunked(codec, pcm, FRAME, rate)), pcm, rate)


def test_rates_that_a_codec_lacks_are_refused() -> None:
    with pytest.raises(RequestError, match="8000, 16000, 24000, 48000") as caught:
        AudioFormat.compressed("opus", 44_100, parameter="response_format")
    assert caught.value.parameter == "sample_rate"
    for codec in ("mp3", "aac", "flac"):
        for rate in SAMPLE_RATES:
            AudioFormat.compressed(codec, rate, parameter="response_format")


def test_the_bit_rate_is_that_of_the_format() -> None:
    pcm = voiced(2.0)
    sizes = []
    for bit_rate in (32_000, 128_000, 320_000):
        encoder = AudioEncoder(AudioFormat("mp3", 44_100, bit_rate))
        sizes.append(len(encoder.encode(pcm) + encoder.end()))
    assert sizes == pytest.approx([8_000, 32_000, 80_000], rel=0.1)
    with pytest.raises(RequestError, match="bit_rate"):
        AudioFormat.compressed("mp3", RATE, 0, parameter="output_format")


def test_encoders_that_are_dropped_within_a_file_are_closed() -> None:
    """PyAV ends the process if it has to collect one that is open."""
    program = """
import gc
import numpy as np
from megakernel_tts.server import codecs

for codec in codecs.NAMES:
    for _ in range(20):
        encoder = codecs.CodecEncoder(codec, 24_000, None)
        encoder.encode(np.ones(5000, np.int16))
        del encoder
    gc.collect()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def speak(server: RunningServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT} | fields)


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_speech_in_a_codec_is_that_of_the_engine(server: RunningServer, codec: Codec) -> None:
    client = OpenAI(api_key="none", base_url=f"{server.url}/v1")
    reply = client.audio.speech.create(
        model="tts-1", voice="alloy", input=TEXT, response_format=codec
    )
    assert reply.response.headers["content-type"] == MEDIA_TYPES[codec]
    encoder = AudioEncoder(AudioFormat(codec))
    pcm = server.speech()
    assert reply.content == encoder.encode(pcm) + encoder.end()
    assert_same_audio(reply.content, pcm)


def test_streams_at_the_same_time_have_their_own_encoders(server: RunningServer) -> None:
    async def speak_all() -> list[bytes]:
        async with httpx.AsyncClient() as client:
            body = {"input": TEXT, "response_format": "mp3"}
            url = f"{server.url}/v1/audio/speech"
            replies = await asyncio.gather(*(client.post(url, json=body) for _ in range(4)))
            return [reply.content for reply in replies]

    assert len(set(asyncio.run(speak_all()))) == 1


def test_the_first_bytes_are_sent_while_the_engine_speaks(server: RunningServer) -> None:
    body = {"input": TEXT * 100, "response_format": "mp3"}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body) as response:
        chunks = response.iter_raw()  # the connection is closed when it is collected
        first = next(chunks)
        assert 0 < len(first) < 10_000
        assert server.num_streams == 1
    wait_until(lambda: server.num_streams == 0)


def test_disconnections_while_audio_is_encoded_end_the_streams(server: RunningServer) -> None:
    body = {"input": TEXT * 100, "response_format": "aac"}
    for _ in range(5):
        with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body) as response:
            next(response.iter_raw())
    wait_until(lambda: server.num_streams == 0)


def test_encoding_runs_on_another_thread_than_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {"__init__": set(), "encode": set(), "end": set()}

    def observe(name: str) -> None:
        method = getattr(CodecEncoder, name)

        def observed(self: CodecEncoder, *arguments: Any) -> Any:
            threads[name].add(threading.get_ident())
            return method(self, *arguments)

        monkeypatch.setattr(CodecEncoder, name, observed)

    for name in threads:
        observe(name)
    assert speak(server, response_format="flac").status_code == 200
    (event_loop,) = threads["__init__"]
    assert threads["encode"] and threads["end"]
    assert event_loop not in threads["encode"] | threads["end"]


@pytest.mark.parametrize("bit_rate", [None, 128_000])
def test_cartesia_sends_mp3_with_a_bit_rate(server: RunningServer, bit_rate: int | None) -> None:
    output_format = {"container": "mp3", "sample_rate": 44_100, "bit_rate": bit_rate}
    body = {"transcript": TEXT, "model_id": "sonic-3", "output_format": output_format}
    reply = httpx.post(f"{server.url}/tts/bytes", json=body)
    assert reply.headers["content-type"] == "audio/mpeg"
    pcm = server.speech()
    seconds = len(pcm) / RATE
    assert 8 * len(reply.content) / seconds == pytest.approx(bit_rate or 64_000, rel=0.15)
    assert_same_audio(reply.content, pcm, 44_100)


def test_events_of_openai_hold_the_codec_and_those_of_cartesia_refuse_it(
    server: RunningServer,
) -> None:
    events = speak(server, response_format="mp3", stream_format="sse").text
    data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    audio = b"".join(base64.b64decode(event.get("audio", "")) for event in data)
    assert audio == speak(server, response_format="mp3").content
    body = {"transcript": TEXT, "output_format": {"container": "mp3", "sample_rate": RATE}}
    assert httpx.post(f"{server.url}/tts/sse", json=body).status_code == 400


def test_without_the_extra_the_error_names_it(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "INSTALLED", False)
    reply = speak(server, response_format="mp3")
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "response_format" and "megakernel-tts[codecs]" in error["message"]
    body = {"transcript": TEXT, "output_format": {"container": "mp3"}}
    reply = httpx.post(f"{server.url}/tts/bytes", json=body)
    assert reply.status_code == 400 and "megakernel-tts[codecs]" in reply.json()["message"]


def test_the_server_is_importable_without_the_extra() -> None:
    program = """
import sys
import threading
sys.modules["av"] = None
from megakernel_tts.server import app, codecs
assert not codecs.INSTALLED
"""
    subprocess.run([sys.executable, "-c", program], check=True)
