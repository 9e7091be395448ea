from typing import Any

import httpx
import numpy as np
import pytest

from megakernel_tts import TTS
from tests.server.running import LOCKED, TEXT, RunningServer, running_server, wait_until

MESSAGE = {"type": "voice-request", "text": TEXT, "sampleRate": 24_000, "timestamp": 1}


def post(server: RunningServer, query: str = "", **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/vapi/voice{query}", json={"message": MESSAGE | fields})


def test_audio_is_that_of_the_engine(server: RunningServer) -> None:
    reply = post(server)
    assert reply.headers["content-type"] == "audio/raw"
    assert np.array_equal(np.frombuffer(reply.content, "<i2"), server.speech())


def test_audio_has_the_rate_of_the_call(server: RunningServer) -> None:
    seconds = len(post(server, sampleRate=8_000).content) / 16_000
    assert abs(seconds - len(server.speech()) / 24_000) < 1e-3


def test_the_url_chooses_voice_and_language(server: RunningServer) -> None:
    assert post(server, "?voice=serena&language=de").status_code == 200
    opened = server.tts._loaded.engine.prompt_builder.opened  # type: ignore[attr-defined]
    assert opened[-1][:2] == ("serena", "german")
    assert post(server, "?voice=nobody").json()["error"]["code"] == "invalid_voice"


@pytest.mark.parametrize(
    "fields", [{"type": "status-update"}, {"text": None}, {"text": " "}, {"sampleRate": 11}]
)
def test_an_invalid_request_is_a_400(server: RunningServer, fields: dict[str, Any]) -> None:
    reply = post(server, **fields)
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_a_disconnection_stops_the_speech(server: RunningServer) -> None:
    aborted = server.metric('requests_success_total{finished_reason="abort"}')
    body = {"message": MESSAGE | {"text": TEXT * 1000}}
    with httpx.stream("POST", f"{server.url}/vapi/voice", json=body) as reply:
        next(reply.iter_raw())
    wait_until(lambda: server.num_streams == 0)
    assert server.metric('requests_success_total{finished_reason="abort"}') == aborted + 1


def test_the_secret_is_a_key(engine: TTS) -> None:
    with running_server(engine, LOCKED) as server:
        url = f"{server.url}/vapi/voice"
        for secret, status in (("secret", 200), ("other", 401)):
            headers = {"X-Vapi-Secret": secret}
            assert httpx.post(url, json={"message": MESSAGE}, headers=headers).status_code == status
