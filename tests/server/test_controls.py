"""Speed, pronunciations and tags: every protocol gives what the engine gives for them."""

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from openai import OpenAI
from pipecat.services.cartesia.tts import CartesiaTTSService, GenerationConfig
from pipecat.services.elevenlabs.tts import ElevenLabsTTSService
from wyoming.audio import AudioStop
from wyoming.event import Event
from wyoming.tts import SynthesizeChunk, SynthesizeStop

from bench.simulation import words_in_audio
from megakernel_tts import TTS, Pronunciations, speed
from megakernel_tts.server.settings import ServerSettings
from tests.server import elevenlabs_client, test_nari, wyoming_client
from tests.server.running import RunningServer, connected, pcm_of, running_server, words_of
from tests.server.test_protocols import Sink, speak

TEXT = 'Hello <break time="0.3s"/>GPU <emotion value="calm"/>and <spell>A1</spell>, friend.'
TABLE = {"GPU": "gee pee you"}
WORDS = ["Hello", "GPU", "and", "A1,", "friend."]
SPEED = 1.5


def post_json(url: str, body: dict[str, Any]) -> httpx.Response:
    """Without certificates, whose loading takes longer than the rest."""
    return httpx.post(url, json=body, verify=False)


def openai(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"input": TEXT, "response_format": "pcm"} | fields
    return post_json(f"{server.url}/v1/audio/speech", body)


def cartesia(server: RunningServer, **fields: Any) -> httpx.Response:
    return post_json(f"{server.url}/tts/bytes", {"transcript": TEXT} | fields)


def elevenlabs(server: RunningServer, **fields: Any) -> httpx.Response:
    url = f"{server.url}/v1/text-to-speech/ryan?output_format=pcm_24000"
    return post_json(url, {"text": TEXT} | fields)


def vapi(server: RunningServer, query: str = "") -> httpx.Response:
    message = {"type": "voice-request", "text": TEXT, "sampleRate": 24_000}
    return post_json(f"{server.url}/vapi/voice{query}", {"message": message})


def of_reply(response: httpx.Response) -> NDArray[np.int16]:
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<i2")


@pytest.mark.parametrize(
    ("post", "fields"),
    [
        (openai, {"speed": SPEED}),
        (cartesia, {"generation_config": {"speed": SPEED, "volume": 1, "emotion": "calm"}}),
        (cartesia, {"speed": SPEED}),
        (elevenlabs, {"voice_settings": {"speed": SPEED, "stability": 0.5}}),
    ],
)
def test_replies_are_those_of_the_engine(
    server: RunningServer, post: Callable[..., httpx.Response], fields: dict[str, Any]
) -> None:
    expected = server.tts.say(TEXT, speed=SPEED, pronunciations=TABLE)
    pcm = of_reply(post(server, pronunciations=TABLE, **fields))
    np.testing.assert_array_equal(pcm, expected.pcm)
    ordinary = server.tts.say(TEXT, pronunciations=TABLE)
    np.testing.assert_array_equal(of_reply(post(server, pronunciations=TABLE)), ordinary.pcm)
    assert [word.text for word in expected.words] == WORDS
    assert len(server.tts.say(TEXT).pcm) < len(ordinary.pcm), "the table has an effect"


@pytest.mark.parametrize("name", ["slow", "normal", "fast"])
def test_cartesias_earlier_names_of_speeds(server: RunningServer, name: str) -> None:
    factor = {"slow": 0.8, "normal": 1.0, "fast": 1.25}[name]
    expected = server.tts.say(TEXT, speed=factor).pcm
    np.testing.assert_array_equal(of_reply(cartesia(server, speed=name)), expected)


def test_the_url_of_vapi_sets_speed_and_pronunciations(server: RunningServer) -> None:
    expected = server.tts.say(TEXT, speed=SPEED, pronunciations=TABLE).pcm
    query = urlencode({"speed": SPEED, "pronunciations": json.dumps(TABLE)})
    np.testing.assert_array_equal(of_reply(vapi(server, f"?{query}")), expected)
    for name, values in {
        "speed": ("fast", "3", "nan", ""),
        "pronunciations": ("", "[]", "1"),
    }.items():
        for invalid in values:
            response = vapi(server, f"?{name}={invalid}")
            assert response.status_code == 400 and name in response.json()["error"]["message"]


@pytest.mark.parametrize("live", [False, True])
def test_events_of_wyoming_set_speed_and_pronunciations(engine: TTS, live: bool) -> None:
    controls = {"speed": SPEED, "pronunciations": TABLE}

    async def use(client: wyoming_client.Client) -> NDArray[np.int16]:
        if live:
            await client.write_event(Event("synthesize-start", controls))
            await client.send(SynthesizeChunk(TEXT), SynthesizeStop())
        else:
            await client.write_event(Event("synthesize", {"text": TEXT} | controls))
        return wyoming_client.pcm_of(await client.until(AudioStop))

    with wyoming_client.serving(engine) as home:
        expected = engine.say(TEXT, speed=SPEED, pronunciations=TABLE).pcm
        np.testing.assert_array_equal(home.run(use), expected)


def test_the_openai_client_sets_the_speed(server: RunningServer) -> None:
    client = OpenAI(api_key="none", base_url=f"{server.url}/v1")
    reply = client.audio.speech.create(
        model="tts-1", voice="alloy", input=TEXT, response_format="pcm", speed=0.5
    )
    expected = server.tts.say(TEXT, speed=0.5).pcm
    np.testing.assert_array_equal(np.frombuffer(reply.content, "<i2"), expected)


def test_live_text_of_cartesia_has_the_words_that_were_written(server: RunningServer) -> None:
    """Tags arrive character by character."""

    async def run() -> list[dict[str, Any]]:
        fields: dict[str, Any] = {"add_timestamps": True, "pronunciations": TABLE}
        fields["generation_config"] = {"speed": SPEED}
        async with connected(server) as client:
            for character in TEXT:
                await client.send("a", character, **fields, **{"continue": True})
            await client.send("a", "", **fields, **{"continue": False})
            return await client.until_done("a")

    events, expected = asyncio.run(run()), server.tts.say(TEXT, speed=SPEED, pronunciations=TABLE)
    words = words_of(events)
    assert [word for word, _ in words] == WORDS
    assert [start for _, start in words] == pytest.approx(
        [word.start for word in expected.words], abs=0.2
    )
    silent = pcm_of(events)[: len(expected.pcm)] == 0
    assert np.count_nonzero(silent) >= 0.3 * 24_000


def test_a_flush_is_reported_after_the_words_before_it(server: RunningServer) -> None:
    """Tags are no words, whatever they contain, and may be in place of a space."""

    async def run() -> list[str]:
        async with connected(server) as client:
            text = '<emotion value="very calm"/>One<break time="0.1s"/>two <break/>'
            await client.send("a", text, add_timestamps=True, **{"continue": True, "flush": True})
            await client.send("a", "three.", add_timestamps=True, **{"continue": False})
            events = await client.until_done("a")
        kinds = [event["type"] for event in events]
        words = [word for word, _ in words_of(events[: kinds.index("flush_done")])]
        return [
            *words,
            "flush",
            *(word for word, _ in words_of(events[kinds.index("flush_done") :])),
        ]

    assert asyncio.run(run()) == ["One", "two", "flush", "three."]


@pytest.mark.parametrize("multi", [True, False])
def test_controls_of_elevenlabs_hold_for_their_context(server: RunningServer, multi: bool) -> None:
    """Clients send them with the first message, which has no text."""

    async def act(client: elevenlabs_client.Client) -> list[dict[str, Any]]:
        context = {"context_id": "a"} if multi else {}
        controls = {"voice_settings": {"speed": SPEED}, "pronunciations": TABLE}
        await client.send(text=" ", **controls, **context)
        await client.send(text="Hello GPU. ", **context)
        if multi:
            await client.send(**context, flush=True)
            await client.send(**context, close_context=True)
        else:
            await client.send(text="")
        return await client.until_final("a" if multi else None)

    path = "multi-stream-input" if multi else "stream-input"
    messages = elevenlabs_client.converse(server, act, path=path)
    expected = server.tts.say("Hello GPU.", speed=SPEED, pronunciations=TABLE).pcm
    np.testing.assert_array_equal(elevenlabs_client.pcm_of(messages), expected)


def test_naris_request_sets_the_speed(server: RunningServer) -> None:
    async def act(client: test_nari.Client) -> bytes:
        await client.start(speed=SPEED, pronunciations=TABLE)
        await client.say(TEXT)
        await client.end(1)
        await client.until_done()
        return client.audio

    audio = test_nari.converse(server, act)
    expected = server.tts.say(TEXT, speed=SPEED, pronunciations=TABLE).pcm
    np.testing.assert_array_equal(np.frombuffer(audio, "<i2"), expected)


def test_a_table_of_the_server_holds_for_all_requests(engine: TTS) -> None:
    """A request's own table counts where both have the word."""
    table = {"GPU": "one two three four", "and": "plus"}
    expected = engine.say(TEXT, pronunciations=table).pcm
    both = engine.say(TEXT, pronunciations=table | TABLE).pcm
    with running_server(engine, ServerSettings(pronunciations=Pronunciations(table))) as server:
        for post in (openai, cartesia, elevenlabs, vapi):
            np.testing.assert_array_equal(of_reply(post(server)), expected)
        np.testing.assert_array_equal(of_reply(openai(server, pronunciations=TABLE)), both)


def of_pipecat_cartesia(server: RunningServer) -> CartesiaTTSService:
    config = GenerationConfig(speed=SPEED)
    settings = CartesiaTTSService.Settings(voice="ryan", model="sonic-3", generation_config=config)
    return CartesiaTTSService(api_key="none", url=server.socket_url, settings=settings)


def of_pipecat_elevenlabs(server: RunningServer) -> ElevenLabsTTSService:
    settings = ElevenLabsTTSService.Settings(voice="ryan", model="simulated", speed=1.2)
    return ElevenLabsTTSService(api_key="none", url=f"ws://{server.authority}", settings=settings)


@pytest.mark.parametrize(
    ("make", "factor"), [(of_pipecat_cartesia, SPEED), (of_pipecat_elevenlabs, 1.2)]
)
def test_services_of_pipecat_set_the_speed_and_send_tags(
    server: RunningServer, make: Callable[[RunningServer], Any], factor: float
) -> None:
    text = 'Hello <emotion value="calm"/>there, <spell>A1</spell> is here.'

    async def run() -> Sink:
        return await speak(make(server), text=text)

    sink, expected = asyncio.run(run()), server.tts.say(text, speed=factor)
    assert not sink.errors
    pcm = np.frombuffer(sink.audio, "<i2")
    assert len(pcm) == pytest.approx(len(expected.pcm), abs=0.1 * 24_000)
    assert words_in_audio(pcm)[-1] == 5
    assert " ".join(sink.words).replace("<spell>", "").replace("</spell>", "").endswith("is here.")


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"speed": 0.25}, "speed"),
        ({"speed": 4.0}, "speed"),
        ({"speed": "fast"}, "speed"),
        ({"pronunciations": ["GPU"]}, "pronunciations"),
        ({"pronunciations": {"GPU": 1}}, "pronunciations"),
        ({"pronunciations": {"two words": "x"}}, "pronunciations"),
        ({"pronunciations": {f"w{i}": "x" for i in range(1001)}}, "pronunciations"),
        ({"input": '<emotion value="sad"/>'}, "input"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_an_invalid_control_is_a_400_that_names_it(
    server: RunningServer, fields: dict[str, Any], parameter: str
) -> None:
    response = openai(server, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == parameter and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "value", [{"generation_config": {"speed": 3}}, {"speed": {}}, {"speed": "x"}]
)
def test_an_invalid_speed_of_cartesia_is_a_400(server: RunningServer, value: Any) -> None:
    response = cartesia(server, **value)
    assert response.status_code == 400 and "speed" in response.json()["message"]


def test_a_server_without_the_extra_refuses_speeds(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "can_scale", lambda: False)
    response = openai(server, speed=SPEED)
    assert response.status_code == 400
    assert "megakernel-tts[speed]" in response.json()["error"]["message"]
    assert openai(server, speed=1.0).status_code == 200
