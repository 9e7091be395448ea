import asyncio
import base64
import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from openai import APIStatusError, AsyncOpenAI, NotFoundError, OpenAI

from megakernel_tts import TTS, Speech
from megakernel_tts.server.connections import BoundedHttpProtocol
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.voices import OPENAI_VOICES
from megakernel_tts.session import FRAME_S
from tests.comparison import assert_same_speech
from tests.server.running import TEXT, RunningServer, running_server, wait_until


@pytest.fixture(scope="module")
def demo_server() -> Iterator[RunningServer]:
    """A server with the demo voice: simulated models speak alike in both layouts."""
    with TTS.load(device="cpu", slots=1) as tts, running_server(tts) as server:
        yield server


def speak(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": "tts-1", "input": TEXT, "voice": "ryan", "response_format": "pcm"} | fields
    return httpx.post(f"{server.url}/v1/audio/speech", json=body)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_pcm_of_the_openai_client_is_that_of_the_engine(server: RunningServer) -> None:
    client = OpenAI(api_key="none", base_url=f"{server.url}/v1")
    reply = client.audio.speech.create(
        model="tts-1", voice="alloy", input=TEXT, response_format="pcm"
    )
    assert np.array_equal(np.frombuffer(reply.content, "<i2"), server.speech())
    assert reply.response.headers["content-type"] == "audio/pcm"
    assert reply.response.headers["x-sample-rate"] == "24000"
    assert reply.response.headers["x-request-id"]
    assert "content-encoding" not in reply.response.headers


def test_wav_is_the_default_format_and_has_a_header_of_unknown_length(
    server: RunningServer,
) -> None:
    response = httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT})
    assert response.headers["content-type"] == "audio/wav"
    assert response.content[:4] == b"RIFF" and response.content[8:16] == b"WAVEfmt "
    assert struct.unpack("<I", response.content[40:44])[0] == 0xFFFFFFFF
    assert np.array_equal(np.frombuffer(response.content[44:], "<i2"), server.speech())


def test_mulaw_has_eight_thousand_bytes_per_second(server: RunningServer) -> None:
    response = speak(server, response_format="mulaw")
    assert response.headers["content-type"] == "audio/basic"
    assert abs(len(response.content) - len(server.speech()) / 3) <= 1


def test_events_hold_the_same_audio_and_end_with_the_usage(server: RunningServer) -> None:
    response = speak(server, stream_format="sse")
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, done = [
        json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")
    ]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert len(base64.b64decode(deltas[0]["audio"])) == 2 * 1920, "more than the first frame"
    audio = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    pcm = np.frombuffer(audio, "<i2")
    assert np.array_equal(pcm, server.speech())
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["output_tokens"] == len(pcm) // 1920


@pytest.mark.parametrize(
    ("fields", "accept", "events"),
    [
        ({}, "*/*", False),
        ({}, "text/event-stream", True),
        ({"stream": True}, "audio/wav, audio/pcm", False),
        ({"stream": True, "stream_format": "sse"}, "*/*", True),
        ({"stream_format": "audio"}, "text/event-stream", False),
    ],
    ids=["default", "accept", "stream", "stream and format", "format over accept"],
)
def test_stream_format_selects_events_before_accept(
    server: RunningServer, fields: dict[str, Any], accept: str, events: bool
) -> None:
    body = {"input": "Hi.", "response_format": "pcm"} | fields
    response = httpx.post(f"{server.url}/v1/audio/speech", json=body, headers={"Accept": accept})
    assert response.headers["content-type"].startswith("text/event-stream") is events


def test_first_audio_is_sent_while_the_engine_speaks(server: RunningServer) -> None:
    body = {"input": TEXT * 100, "response_format": "pcm"}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body) as response:
        chunks = response.iter_raw()  # the connection is closed when it is collected
        first = next(chunks)
        assert 0 < len(first) < 24_000 * 2
        assert server.num_streams == 1
    wait_until(lambda: server.num_streams == 0)


def test_a_disconnection_stops_the_stream_and_frees_its_slot(server: RunningServer) -> None:
    cancelled = server.metric('requests_success_total{finished_reason="abort"}')
    body = {"input": TEXT * 1000, "response_format": "pcm"}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body) as response:
        next(response.iter_raw())
    wait_until(lambda: server.num_streams == 0)
    assert server.metric('requests_success_total{finished_reason="abort"}') == cancelled + 1


def test_a_client_that_does_not_read_neither_delays_others_nor_stays(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megakernel_tts.server.playback.MAX_BEHIND_S", 0.3)
    body = json.dumps({"input": TEXT * 1000, "response_format": "pcm", "sample_rate": 48_000})
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.authority.split(":")
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        idle.connect((host, int(port)))
        idle.sendall((head + body).encode())
        wait_until(lambda: server.num_streams == 1)
        assert len(speak(server).content) == 2 * len(server.speech())
        wait_until(lambda: server.num_streams == 0)


def test_little_audio_is_made_for_a_client_that_does_not_read(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own send buffer grows to a minute of it."""
    backend: Any = server.tts._loaded.engine.backend
    scheduler = server.tts._loaded.engine._loop.scheduler
    num_before, is_full = backend.num_made, threading.Event()
    pause, resume = BoundedHttpProtocol.pause_writing, BoundedHttpProtocol.resume_writing

    def record_pause(protocol: BoundedHttpProtocol) -> None:
        pause(protocol)
        is_full.set()

    def record_resumption(protocol: BoundedHttpProtocol) -> None:
        is_full.clear()
        resume(protocol)

    monkeypatch.setattr(BoundedHttpProtocol, "pause_writing", record_pause)
    monkeypatch.setattr(BoundedHttpProtocol, "resume_writing", record_resumption)
    body = json.dumps({"input": TEXT * 1000, "response_format": "pcm"})
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.authority.split(":")
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        idle.connect((host, int(port)))
        idle.sendall((head + body).encode())
        wait_until(lambda: backend.num_made > num_before)
        wait_until(lambda: is_full.is_set() and all(s.stalled for s in scheduler.streams))
        assert 0 < FRAME_S * (backend.num_made - num_before) < 15
    wait_until(lambda: server.num_streams == 0)


def test_openai_voices_are_those_of_the_model(server: RunningServer) -> None:
    for voice in (*OPENAI_VOICES, "ryan", {"id": "Serena"}, None):
        assert speak(server, input="Hi.", voice=voice).status_code == 200
    prompt_builder = server.tts._loaded.engine.prompt_builder
    opened = [voice for voice, *_ in prompt_builder.opened[-16:]]  # type: ignore[attr-defined]
    assert opened == ["ryan", "serena"] * 6 + ["ryan", "ryan", "serena", "ryan"]


def test_unknown_fields_are_ignored(server: RunningServer) -> None:
    fields = {"extra_params": {"a": 1}, "ignore_eos": None, "stage_params": {"a": [1]}}
    assert speak(server, **fields).status_code == 200


@pytest.mark.parametrize(("value", "expected"), [(None, 1), (0, 1), (1, 1), (3, 3), (100, 8)])
def test_the_first_audio_has_the_frames_of_the_field(
    server: RunningServer, value: int | None, expected: int
) -> None:
    response = speak(server, stream_format="sse", initial_codec_chunk_frames=value)
    deltas = [json.loads(line[6:]) for line in response.text.splitlines() if line[:6] == "data: "]
    audio = [base64.b64decode(delta.get("audio", "")) for delta in deltas]
    assert len(audio[0]) == expected * 2 * 1920
    assert np.array_equal(np.frombuffer(b"".join(audio), "<i2"), server.speech())


@pytest.mark.parametrize("task", ["CustomVoice", "custom_voice", None])
def test_the_task_of_the_model_is_accepted(server: RunningServer, task: str | None) -> None:
    assert speak(server, task_type=task).status_code == 200


@pytest.mark.parametrize("seed", [3, 4])
def test_non_streaming_mode_selects_the_layout_of_the_text(
    demo_server: RunningServer, seed: int
) -> None:
    demo, fields = demo_server.tts, {"voice": "clara", "seed": seed, "max_new_tokens": 6}
    sampling = replace(demo.sampling, seed=seed, max_frames=6)

    def say(layout: Any) -> Speech:
        return demo.say(TEXT, "clara", layout=layout, sampling=sampling)

    assert not np.array_equal(say("full").codes, say("streaming").codes)
    selected: list[tuple[dict[str, Any], str]] = [
        ({}, "auto"),
        ({"non_streaming_mode": None}, "auto"),
        ({"non_streaming_mode": True}, "full"),
        ({"non_streaming_mode": False}, "streaming"),
    ]
    for mode, layout in selected:
        reply = speak(demo_server, **fields, **mode)
        assert_same_speech(reply.content, say(layout).pcm.tobytes())


def test_seed_and_sampling_fields_are_those_of_the_engine(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    open_session = server.tts.open

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        opened.append((arguments, keywords["sampling"]))
        return open_session(*arguments, **keywords)

    monkeypatch.setattr(server.tts, "open", recorded)
    fields = {"seed": 7, "top_k": 3, "subtalker_top_p": 0.5, "do_sample": False}
    assert speak(server, language="de-DE", instructions="Calm.", **fields).status_code == 200
    (voice, language, instruct), sampling = opened[0]
    assert (voice, language, instruct) == ("ryan", "german", "Calm.")
    assert (sampling.seed, sampling.top_k, sampling.predictor_top_p) == (7, 3, 0.5)
    assert (sampling.temperature, sampling.predictor_temperature) == (0.0, 0.9)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"input": " "}, "input"),
        ({"input": None}, "input"),
        ({"input": "a" * 70_000}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"voice": "nobody"}, "voice"),
        ({"voice": 3}, "voice"),
        ({"language": "klingon"}, "language"),
        ({"response_format": "midi"}, "response_format"),
        ({"sample_rate": 11_025}, "sample_rate"),
        ({"speed": 4.0}, "speed"),
        ({"stream_format": "ogg"}, "stream_format"),
        ({"temperature": -1}, "temperature"),
        ({"subtalker_top_k": 1.5}, "subtalker_top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"seed": "7"}, "seed"),
        ({"do_sample": 1}, "do_sample"),
        ({"non_streaming_mode": "false"}, "non_streaming_mode"),
        ({"non_streaming_mode": 0}, "non_streaming_mode"),
        ({"initial_codec_chunk_frames": -1}, "initial_codec_chunk_frames"),
        ({"initial_codec_chunk_frames": 1.5}, "initial_codec_chunk_frames"),
        ({"task_type": "Base"}, "task_type"),
        ({"task_type": "dubbing"}, "task_type"),
        ({"instructions": ["Calm."]}, "instructions"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_an_invalid_field_is_a_400_that_names_it(
    server: RunningServer, fields: dict[str, Any], parameter: str
) -> None:
    body = json.dumps({"input": TEXT} | fields)
    response = httpx.post(f"{server.url}/v1/audio/speech", content=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == parameter
    assert error_of(response)["type"] == "invalid_request_error"


def test_an_instruction_that_the_model_does_not_take_is_named(demo_server: RunningServer) -> None:
    response = speak(demo_server, voice="alloy", instructions="Calm.")
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("instructions", "invalid_instructions")


def test_a_model_that_is_no_name_is_a_404(server: RunningServer) -> None:
    assert speak(server, model=["tts-1"]).status_code == 404


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff", b"[" * 100_000],
    ids=["empty", "open", "array", "byte", "deep"],
)
def test_a_body_that_is_no_object_is_a_400(server: RunningServer, body: bytes) -> None:
    response = httpx.post(f"{server.url}/v1/audio/speech", content=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


def test_a_large_body_is_a_413(server: RunningServer) -> None:
    response = httpx.post(f"{server.url}/v1/audio/speech", content=b" " * (2 << 20))
    assert response.status_code == 413


def test_models_are_listed_and_unknown_ones_are_404(server: RunningServer) -> None:
    client = OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0)
    assert [model.id for model in client.models.list()] == ["simulated"]
    assert client.models.retrieve("simulated").owned_by == "megakernel-tts"
    with pytest.raises(NotFoundError) as speech:
        client.audio.speech.create(model="nope", voice="alloy", input="Hi.")
    with pytest.raises(NotFoundError) as model:
        client.models.retrieve("an/unknown")
    for error in (speech.value, model.value):
        assert (error.code, error.param) == ("model_not_found", "model")
        assert error.type == "invalid_request_error" and error.request_id


def test_voices_are_listed(server: RunningServer) -> None:
    reply = httpx.get(f"{server.url}/v1/audio/voices").json()
    assert reply == {"voices": ["ryan", "serena"], "uploaded_voices": []}


def test_unknown_paths_and_methods_have_errors_of_the_same_format(server: RunningServer) -> None:
    assert error_of(httpx.get(f"{server.url}/v1/nothing"))["code"] == "not_found"
    assert httpx.get(f"{server.url}/v1/audio/speech").status_code == 405


def test_a_failure_before_the_first_audio_is_a_500(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.tts._loaded.engine.backend, "failing_word", "Failing")
    response = speak(server, input="Failing at once.")
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_a_failure_after_the_first_audio_is_not_taken_for_an_end(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream_format: str
) -> None:
    monkeypatch.setattr(server.tts._loaded.engine.backend, "failing_word", "Failing")
    text = "This begins as it should, and then it fails: Failing."
    if stream_format == "audio":
        with pytest.raises(httpx.RemoteProtocolError):
            speak(server, input=text)
    else:
        assert "speech.audio.error" in speak(server, input=text, stream_format="sse").text


def test_overload_is_answered_at_once_with_429_and_retry_after(engine: TTS) -> None:
    async def overload(server: RunningServer) -> None:
        client = AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0)
        arguments: Any = {"model": "tts-1", "voice": "alloy", "response_format": "pcm"}
        held = client.audio.speech.with_streaming_response
        streams = [held.create(input=TEXT * 500, **arguments) for _ in range(engine.slots)]
        for stream in streams:
            await stream.__aenter__()
        with pytest.raises(APIStatusError) as caught:
            await client.audio.speech.create(input=TEXT, **arguments)
        assert caught.value.status_code == 429
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert (await asyncio.to_thread(httpx.get, f"{server.url}/ready")).status_code == 503
        assert (await asyncio.to_thread(httpx.get, f"{server.url}/health")).status_code == 200
        for stream in streams:
            await stream.__aexit__(None, None, None)
        await client.close()

    with running_server(engine, ServerSettings(max_queue=0)) as server:
        asyncio.run(overload(server))
        wait_until(lambda: server.num_streams == 0)
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert server.metric('rejected_requests_total{reason="overload"}') == 1


@pytest.mark.parametrize("digits", ["1" + "0" * 400, "1e400", "NaN", "-Infinity"])
def test_numbers_beyond_the_range_of_floats_are_refused(server: RunningServer, digits: str) -> None:
    for field in ("speed", "temperature", "top_k", "sample_rate"):
        body = f'{{"input": "Hi.", "{field}": {digits}}}'
        response = httpx.post(f"{server.url}/v1/audio/speech", content=body)
        assert response.status_code == 400 and error_of(response)["message"]
