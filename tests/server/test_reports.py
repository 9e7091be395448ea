import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from megakernel_tts import TTS
from megakernel_tts.server.accounts import Account
from megakernel_tts.server.app import Server
from megakernel_tts.server.keys import ApiKey, Priority
from megakernel_tts.server.logs import JsonFormatter, TextFormatter
from megakernel_tts.server.reports import Caller, SpeechReport
from megakernel_tts.server.settings import ServerSettings
from tests.server.running import TEXT, RunningServer, connected, running_server, wait_until

Fields = dict[str, Any]


def fields_of(caplog: pytest.LogCaptureFixture) -> list[Fields]:
    """The fields of the log's lines about requests."""
    return [record.fields for record in caplog.records if record.getMessage() == "speech"]  # type: ignore[attr-defined]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "megakernel_tts.server")
    return caplog


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"input": TEXT, "response_format": "pcm", "voice": "serena"} | fields
    headers = {"X-API-Key": "secret-key"}
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, headers=headers)


def test_each_request_has_a_line_at_its_end(engine: TTS, log: pytest.LogCaptureFixture) -> None:
    key = ApiKey(name="bot", key="secret-key", requests_per_minute=1, priority=Priority.LIVE)
    with running_server(engine, ServerSettings(api_keys=(key,))) as server:
        spoken, refused = post(server), post(server)
        seconds = len(server.speech()) / 24_000
    first, second = fields_of(log)
    assert first.pop("request_id") == spoken.headers["x-request-id"]
    assert 0 < first.pop("first_audio_ms") <= 1000 * first.pop("duration_s")
    assert first.pop("slot_wait_ms") == 0 <= first.pop("underrun_ms")
    assert first.pop("audio_s") == pytest.approx(seconds, abs=0.01)
    assert first == {
        "protocol": "openai",
        "key": "bot",
        "priority": "live",
        "voice": "serena",
        "characters": len(TEXT),
        "finish_reason": "stop",
    }
    assert (second["finish_reason"], second["request_id"]) == (
        "limit",
        refused.headers["x-request-id"],
    )
    assert "first_audio_ms" not in second


def test_the_line_has_how_long_playback_waited() -> None:
    caller = Caller("openai", "req_1", Account())
    report = SpeechReport(caller=caller, voice="", priority=Priority.LIVE, underrun_s=0.25)
    assert report.fields()["underrun_ms"] == 250


def test_a_server_in_front_identifies_requests(engine: TTS, log: pytest.LogCaptureFixture) -> None:
    server = Server(engine)

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"request_id": "front-1"}
        await server.app(scope, receive, send)

    async def post_through_front() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front)) as client:
            return await client.post("http://front/v1/audio/speech", json={"input": TEXT})

    reply = asyncio.run(post_through_front())
    assert reply.status_code == 200 and "x-request-id" not in reply.headers
    assert [fields["request_id"] for fields in fields_of(log)] == ["front-1"]


def test_the_log_holds_neither_text_nor_keys(engine: TTS, log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.DEBUG)
    settings = ServerSettings(api_keys=(ApiKey(name="bot", key="secret-key"),))
    with running_server(engine, settings) as server:
        assert post(server).status_code == 200
        assert post(server, input=" ").status_code == 400
        url = f"{server.url}/v1/audio/speech"
        assert httpx.post(f"{url}?api_key=secret-key", json={"input": TEXT}).status_code == 200
        assert httpx.post(url, json={"input": TEXT}).status_code == 401

        async def speak() -> None:
            async with connected(server, additional_headers={"X-API-Key": "secret-key"}) as client:
                await client.send("a", TEXT)
                await client.until_done("a")

        asyncio.run(speak())
    ours = [record for record in log.records if record.name.startswith(("megakernel", "uvicorn"))]
    for formatter in (TextFormatter(), JsonFormatter()):
        lines = "\n".join(map(formatter.format, ours))
        assert "speech" in lines and "secret-key" not in lines and "friend" not in lines


def test_contexts_of_a_socket_have_lines_with_its_identifier(
    server: RunningServer, log: pytest.LogCaptureFixture
) -> None:
    async def speak() -> str:
        async with connected(server) as client:
            await client.send("a", TEXT)
            await client.until_done("a")
            await client.send("b", TEXT * 500)
            await client.receive()
            await client.cancel("b")
            assert client.websocket.response is not None
            return client.websocket.response.headers["x-request-id"]

    request_id = asyncio.run(speak())
    wait_until(lambda: server.num_streams == 0)
    first, second = fields_of(log)
    assert first["request_id"] == second["request_id"] == request_id
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "abort")
    assert first["protocol"] == "cartesia" and first["priority"] == "live"
    assert "key" not in first


def test_a_failure_has_a_line(
    server: RunningServer, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.tts._loaded.engine.backend, "failing_word", "Hello")
    assert post(server).status_code == 500
    wait_until(lambda: server.num_streams == 0)
    assert fields_of(log)[-1]["finish_reason"] == "error"


def record(message: str, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("megakernel_tts.server", logging.INFO, "", 0, message, (), None)
    made.created = 0.0
    made.fields = fields
    return made


def test_a_json_line_is_an_object_with_the_fields() -> None:
    line = JsonFormatter().format(record("speech\n", voice='a"b', characters=3))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.000Z",
        "level": "info",
        "logger": "megakernel_tts.server",
        "message": "speech\n",
        "voice": 'a"b',
        "characters": 3,
    }


def test_a_text_line_quotes_values_that_could_be_taken_for_others() -> None:
    line = TextFormatter().format(record("speech", voice="a b", key="x\ny=1", characters=3))
    assert line == ('1970-01-01T00:00:00.000Z INFO speech voice="a b" key="x\\ny=1" characters=3')


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_exceptions_are_shown_with_their_traceback(formatter: logging.Formatter) -> None:
    try:
        raise ArithmeticError("reason")
    except ArithmeticError as error:
        made = record("failed")
        made.exc_info = (type(error), error, error.__traceback__)
    line = formatter.format(made)
    assert "Traceback" in line and "reason" in line
    assert isinstance(formatter, TextFormatter) or "Traceback" in json.loads(line)["exception"]
