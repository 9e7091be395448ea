import asyncio
import base64
import io
import json
import threading
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from megakernel_tts import TTS, Session
from megakernel_tts.server import openai_batch
from megakernel_tts.server.keys import ApiKey, Priority
from megakernel_tts.server.settings import ServerSettings
from tests.fakes import TIMEOUT_S
from tests.server.running import TEXT, RunningServer, running_server, until, wait_until

TEXTS = [f"{TEXT} Number {number}." for number in range(6)]  # more than slots


def speak(server: RunningServer, items: object, **fields: Any) -> httpx.Response:
    url = f"{server.url}/v1/audio/speech/batch"
    return httpx.post(url, content=json.dumps({"items": items} | fields))


def test_each_item_is_the_speech_of_its_text(server: RunningServer) -> None:
    items = [{"input": text, "response_format": None} for text in TEXTS]
    reply = speak(server, items, response_format="wav").json()
    assert (reply["total"], reply["succeeded"], reply["failed"]) == (6, 6, 0)
    assert reply["id"]
    for index, (text, result) in enumerate(zip(TEXTS, reply["results"], strict=True)):
        assert (result["index"], result["status"], result["error"]) == (index, "success", None)
        assert result["media_type"] == "audio/wav"
        file = io.BytesIO(base64.b64decode(result["audio_data"]))
        pcm, rate = soundfile.read(file, dtype="int16")
        assert rate == 24_000
        np.testing.assert_array_equal(pcm, server.speech(text))
        assert result["usage"]["input_tokens"] == len(text)
        assert result["usage"]["output_tokens"] == len(pcm) // 1920


def test_fields_of_an_item_precede_those_of_the_request(server: RunningServer) -> None:
    items = [{"input": TEXT}, {"input": TEXT, "voice": "serena", "response_format": "mulaw"}]
    reply = speak(server, items, voice="ryan", response_format="pcm", language="de").json()
    assert [result["media_type"] for result in reply["results"]] == ["audio/pcm", "audio/basic"]
    opened = server.tts._loaded.engine.prompt_builder.opened  # type: ignore[attr-defined]
    assert [each[:2] for each in opened[-2:]] == [("ryan", "german"), ("serena", "german")]


def test_an_item_has_the_layout_of_the_request_unless_it_names_its_own(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[str, str] = {}
    open_session = server.tts.open

    def recorded(*arguments: Any, text: str, layout: Any, **keywords: Any) -> Session:
        opened[text] = layout
        return open_session(*arguments, text=text, layout=layout, **keywords)

    monkeypatch.setattr(server.tts, "open", recorded)
    items = [{"input": "One."}, {"input": "Two.", "non_streaming_mode": True}]
    assert speak(server, items, non_streaming_mode=False).json()["succeeded"] == 2
    assert opened == {"One.": "streaming", "Two.": "full"}


def test_an_item_that_fails_does_not_affect_others(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [{"input": TEXT}, {"input": TEXT, "voice": "nobody"}, {}, {"input": TEXT, "speed": 9}]
    reply = speak(server, items, response_format="pcm").json()
    assert (reply["total"], reply["succeeded"], reply["failed"]) == (4, 1, 3)
    first, *failed = reply["results"]
    assert base64.b64decode(first["audio_data"]) == server.speech().tobytes()
    for result, part in zip(failed, ("no voice 'nobody'", "input must be", "speed"), strict=True):
        assert result["status"] == "error" and part in result["error"]
        assert result["audio_data"] is result["media_type"] is result["usage"] is None

    monkeypatch.setattr(server.tts._loaded.engine.backend, "failing_word", "Failing")
    reply = speak(server, [{"input": "It begins well and ends badly: Failing."}]).json()
    (result,) = reply["results"]
    assert result["status"] == "error" and result["audio_data"] is None


@pytest.mark.parametrize(
    "items",
    [None, {}, [], ["Hello."], [{"input": "Hi."}] * 33, [{"input": "x" * 1000}] * 17],
    ids=lambda value: str(value)[:30],
)
def test_items_of_another_form_are_a_400(server: RunningServer, items: object) -> None:
    reply = speak(server, items)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "items"


def test_items_are_streams_of_low_priority_within_the_limit_of_the_key(engine: TTS) -> None:
    key = ApiKey(name="bot", key="secret", streams=1)
    with running_server(engine, ServerSettings(api_keys=(key,))) as server:
        streams, priorities = server.server.streams, list[Priority]()
        open_stream = streams.open

        async def recorded(request: Any, caller: Any) -> Any:
            priorities.append(request.priority)
            return await open_stream(request, caller)

        streams.open = recorded
        reply = httpx.post(
            f"{server.url}/v1/audio/speech/batch",
            json={"items": [{"input": TEXT}] * 3 + [{"input": TEXT, "priority": "live"}]},
            headers={"X-API-Key": "secret"},
        )
    assert reply.json()["succeeded"] == 4, "one after the other"
    assert priorities == [Priority.BATCH] * 3 + [Priority.LIVE]


def test_audio_beyond_the_limit_fails_its_item_only(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silence of a break counts as well."""
    speech = server.speech().tobytes()
    monkeypatch.setattr(openai_batch, "_MAX_AUDIO_BYTES", 3 * len(speech))
    silence = 5 * '<break time="10s"/>'
    items = [{"input": TEXT}, {"input": f"{TEXT} {silence}"}, {"input": TEXT}]
    reply = speak(server, items, response_format="pcm").json()
    first, long, last = reply["results"]
    assert base64.b64decode(first["audio_data"]) == base64.b64decode(last["audio_data"]) == speech
    assert long["status"] == "error" and "at most" in long["error"] and not long["audio_data"]
    wait_until(lambda: server.num_streams == 0)


def test_a_full_server_refuses_a_batch_at_once(engine: TTS) -> None:
    async def act(server: RunningServer) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            speaking = [
                asyncio.create_task(client.post("/v1/audio/speech", json={"input": TEXT * 500}))
                for _ in range(engine.slots)
            ]
            await until(lambda: server.server.streams.full)
            reply = await client.post("/v1/audio/speech/batch", json={"items": [{"input": TEXT}]})
            assert reply.status_code == 429 and reply.headers["retry-after"]
            for task in speaking:
                task.cancel()
            await asyncio.gather(*speaking, return_exceptions=True)

    with running_server(engine, ServerSettings(max_queue=0)) as server:
        asyncio.run(act(server))
        wait_until(lambda: server.num_streams == 0)


def test_a_disconnection_stops_all_items(server: RunningServer) -> None:
    spoken = server.metric('requests_success_total{finished_reason="stop"}')
    items = [{"input": TEXT * 140} for _ in range(5)]
    url = f"{server.url}/v1/audio/speech/batch"
    with httpx.stream("POST", url, json={"items": items}) as reply:
        chunks = reply.iter_raw()  # the connection is closed when it is collected
        next(chunks)
        wait_until(lambda: server.num_streams == server.tts.slots)
    wait_until(lambda: server.num_streams == 0)
    assert server.metric('requests_success_total{finished_reason="stop"}') == spoken


def test_a_client_that_does_not_read_is_disconnected(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_batch, "_SEND_TIMEOUT_S", 0.2)
    ended, deliver = threading.Event(), openai_batch._BatchResponse._deliver

    async def recorded(*arguments: Any) -> None:
        await deliver(*arguments)
        ended.set()

    monkeypatch.setattr(openai_batch._BatchResponse, "_deliver", recorded)
    body = {"items": [{"input": TEXT * 60, "sample_rate": 48_000}]}  # of 15 MB
    with httpx.stream("POST", f"{server.url}/v1/audio/speech/batch", json=body) as reply:
        chunks = reply.iter_raw()
        next(chunks)
        assert ended.wait(TIMEOUT_S)
        with pytest.raises(httpx.RemoteProtocolError):
            list(chunks)
