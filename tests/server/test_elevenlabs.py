import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from elevenlabs.client import ElevenLabs
from elevenlabs.core.api_error import ApiError

from megakernel_tts import TTS
from tests.server.decoding import RATE, assert_same_audio
from tests.server.running import LOCKED, TEXT, RunningServer, running_server, wait_until

PCM = "pcm_24000"

# The official client's own use of websockets.
ignore_deprecation = pytest.mark.filterwarnings("ignore:ConnectionClosed:DeprecationWarning")


@pytest.fixture
def client(server: RunningServer) -> Iterator[ElevenLabs]:
    """The official client; its WebSocket needs TLS unless it has another URL."""
    with httpx.Client() as http:
        client = ElevenLabs(api_key="none", base_url=server.url, httpx_client=http)
        client.text_to_speech._ws_base_url = f"ws://{server.authority}"
        yield client


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/text-to-speech/{path}", json={"text": TEXT} | fields)


def test_the_elevenlabs_client_gets_the_audio_of_the_engine(
    client: ElevenLabs, server: RunningServer
) -> None:
    speech = client.text_to_speech
    whole = speech.convert("ryan", text=TEXT, output_format=PCM)
    stream = speech.stream("ryan", text=TEXT, output_format=PCM)
    for chunks in (whole, stream):
        assert np.array_equal(np.frombuffer(b"".join(chunks), "<i2"), server.speech())


def test_the_elevenlabs_client_gets_the_words_of_the_engine(
    client: ElevenLabs, server: RunningServer
) -> None:
    speech = client.text_to_speech
    audio, characters, starts = b"", list[str](), list[float]()
    for chunk in speech.stream_with_timestamps("ryan", text=TEXT, output_format=PCM):
        audio += base64.b64decode(chunk.audio_base_64)
        if chunk.alignment is not None:
            characters += chunk.alignment.characters
            starts += chunk.alignment.character_start_times_seconds
    assert np.array_equal(np.frombuffer(audio, "<i2"), server.speech())
    assert_times_of_the_engine(server, characters, starts)

    reply = speech.convert_with_timestamps("ryan", text=TEXT, output_format=PCM)
    assert base64.b64decode(reply.audio_base_64) == audio
    times = reply.alignment
    assert times is not None and times == reply.normalized_alignment
    assert times.characters == characters
    assert times.character_start_times_seconds == starts
    ends = times.character_end_times_seconds
    assert ends[:-1] == starts[1:] and ends[-1] == pytest.approx(len(audio) / 48_000, abs=1e-3)


def assert_times_of_the_engine(
    server: RunningServer, characters: list[str], starts: list[float]
) -> None:
    words, text = server.tts.say(TEXT).words, "".join(characters)
    assert text == f"{TEXT} "
    assert [starts[text.index(word.text)] for word in words] == [word.start for word in words]


@pytest.mark.parametrize("output_format", ["ulaw_8000", "mp3_44100_128"])
def test_audio_within_an_object_is_that_of_a_plain_reply(
    server: RunningServer, output_format: str
) -> None:
    """Its portions have other lengths than groups of base64."""
    query = f"?output_format={output_format}"
    timed = post(server, f"ryan/with-timestamps{query}").json()
    assert base64.b64decode(timed["audio_base64"]) == post(server, f"ryan{query}").content


@ignore_deprecation
def test_the_elevenlabs_client_speaks_live_text(client: ElevenLabs, server: RunningServer) -> None:
    def text() -> Iterator[str]:
        yield "Hello there, "
        yield "my friend."

    speech = client.text_to_speech
    audio = b"".join(speech.convert_realtime("ryan", text=text(), output_format=PCM))
    assert np.array_equal(np.frombuffer(audio, "<i2"), server.speech())


@ignore_deprecation
def test_the_elevenlabs_client_gets_mp3(client: ElevenLabs, server: RunningServer) -> None:
    speech = client.text_to_speech
    default = b"".join(speech.convert("ryan", text=TEXT))
    assert_same_audio(default, server.speech(), 44_100)
    assert 8 * len(default) / len(server.speech()) * RATE == pytest.approx(128_000, rel=0.1)
    text = iter(["Hello there, ", "my friend."])
    live = b"".join(speech.convert_realtime("ryan", text=text, output_format="mp3_22050_32"))
    assert_same_audio(live, server.speech(), 22_050)


@ignore_deprecation
def test_the_elevenlabs_client_gets_the_reason_of_a_refused_connection(client: ElevenLabs) -> None:
    speech = client.text_to_speech
    with pytest.raises(ApiError) as caught:
        list(speech.convert_realtime("nobody", text=iter([TEXT]), output_format=PCM))
    assert caught.value.status_code == 1008
    assert "nobody" in str(caught.value.body)


def test_the_elevenlabs_client_lists_the_voices(client: ElevenLabs) -> None:
    assert [voice.voice_id for voice in client.voices.get_all().voices] == ["ryan", "serena"]
    assert [voice.name for voice in client.voices.search().voices] == ["ryan", "serena"]


def test_an_invalid_key_is_a_401(engine: TTS) -> None:
    with (
        running_server(engine, LOCKED) as server,
        httpx.Client() as http,
    ):

        def audio(key: str) -> list[bytes]:
            client = ElevenLabs(api_key=key, base_url=server.url, httpx_client=http)
            return list(client.text_to_speech.convert("ryan", text=TEXT, output_format=PCM))

        with pytest.raises(ApiError) as caught:
            audio("other")
        assert caught.value.status_code == 401
        assert audio("secret")


@pytest.mark.parametrize(
    ("name", "media_type", "bytes_per_second"),
    [
        ("pcm_8000", "audio/pcm", 16_000),
        ("pcm_48000", "audio/pcm", 96_000),
        ("ulaw_8000", "audio/basic", 8_000),
        ("alaw_8000", "audio/x-alaw-basic", 8_000),
    ],
)
def test_every_output_format_keeps_the_duration(
    server: RunningServer, name: str, media_type: str, bytes_per_second: int
) -> None:
    reply = post(server, f"ryan?output_format={name}")
    assert reply.headers["content-type"] == media_type
    seconds = len(server.speech()) / 24_000
    assert abs(len(reply.content) / bytes_per_second - seconds) < 1e-3


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("nobody?output_format=pcm_24000", {}, "invalid_voice"),
        ("ryan?output_format=mp3_44100", {}, "unsupported_output_format"),
        ("ryan?output_format=mp3_11025_32", {}, "invalid_value"),
        ("ryan?output_format=mp3_22050_999", {}, "invalid_value"),
        ("ryan?output_format=pcm_many", {}, "unsupported_output_format"),
        ("ryan?output_format=pcm_11025", {}, "invalid_value"),
        ("ryan?output_format=pcm_24000", {"text": None}, "invalid_value"),
        ("ryan?output_format=pcm_24000", {"text": " "}, "invalid_text"),
        ("ryan?output_format=pcm_24000", {"language_code": "xx"}, "invalid_language"),
        ("ryan/stream?output_format=pcm_24000", {"seed": "7"}, "invalid_sampling"),
        ("ryan/with-timestamps?output_format=wav", {}, "unsupported_output_format"),
        ("ryan/stream/with-timestamps?output_format=wav", {}, "unsupported_output_format"),
    ],
)
def test_errors_have_elevenlabs_format(
    server: RunningServer, path: str, fields: dict[str, Any], code: str
) -> None:
    reply = post(server, path, **fields)
    assert reply.status_code == 400
    assert reply.json()["detail"]["status"] == code
    assert reply.json()["detail"]["message"]


def test_unknown_paths_have_errors_of_the_same_format(server: RunningServer) -> None:
    assert post(server, "ryan/nothing").json()["detail"]["status"] == "http_error"
    assert httpx.get(f"{server.url}/v1/text-to-speech/ryan").status_code == 405


@pytest.mark.parametrize("path", ["stream", "with-timestamps"])
def test_a_disconnection_stops_the_stream(server: RunningServer, path: str) -> None:
    aborted = server.metric('requests_success_total{finished_reason="abort"}')
    url = f"{server.url}/v1/text-to-speech/ryan/{path}?output_format={PCM}"
    with httpx.stream("POST", url, json={"text": TEXT * 1000}) as reply:
        next(reply.iter_raw())
    wait_until(lambda: server.num_streams == 0)
    assert server.metric('requests_success_total{finished_reason="abort"}') == aborted + 1
