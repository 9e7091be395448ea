import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bench.simulation import simulated_tts
from megakernel_tts import TTS, Session, Voice
from megakernel_tts.server.app import Server
from megakernel_tts.server.settings import ServerSettings
from tests.fakes import TIMEOUT_S
from tests.server.running import TEXT, RunningServer, running_server, wait_until


def test_the_server_is_ready_once_the_engine_is_warm() -> None:
    with simulated_tts(num_slots=1, frame_seconds=0.0) as tts, running_server(tts) as server:
        wait_until(lambda: tts.warm)
        assert httpx.get(f"{server.url}/ready").json() == {"ready": True, "reason": None}


def test_health_and_readiness_end_with_the_engine() -> None:
    with simulated_tts(num_slots=1, frame_seconds=0.0) as tts, running_server(tts) as server:
        wait_until(lambda: tts.warm)
        assert httpx.get(f"{server.url}/health").status_code == 200
        tts.close()
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert httpx.get(f"{server.url}/ready").status_code == 503
        reply = httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT})
        assert reply.status_code == 503 and "retry-after" in reply.headers


def test_a_server_that_stops_refuses_new_streams(engine: TTS) -> None:
    with running_server(engine) as server:
        server.server.streams.draining = True
        reply = httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT})
        assert reply.status_code == 503 and "retry-after" in reply.headers
        assert httpx.get(f"{server.url}/ready").json()["reason"] == "the server is stopping"
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/audio/speech", {"input": TEXT, "response_format": "pcm"}),
        ("/v1/audio/speech", {"input": TEXT, "stream_format": "sse"}),
        ("/tts/bytes", {"transcript": TEXT}),
        ("/tts/sse", {"transcript": TEXT}),
        ("/v1/text-to-speech/ryan/stream?output_format=pcm_24000", {"text": TEXT}),
        ("/vapi/voice", {"message": {"type": "voice-request", "text": TEXT}}),
    ],
    ids=["raw", "events", "cartesia raw", "cartesia events", "elevenlabs", "vapi"],
)
def test_proxies_neither_buffer_nor_cache_speech(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    reply = httpx.post(server.url + path, json=body)
    assert reply.status_code == 200 and len(reply.content) > 10_000
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["cache-control"] == "no-cache"


def test_metrics_describe_the_streams(server: RunningServer) -> None:
    before = server.metric('requests_success_total{finished_reason="stop"}')
    httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT})
    reply = httpx.get(f"{server.url}/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    for name in (
        "audio_ttfp_s", "audio_duration_s", "audio_rtf", "audio_underrun_s", "cancel_latency_s",
        "e2e_request_latency_s", "num_requests_running", "num_requests_waiting",
        "requests_success_total", "rejected_requests_total", "websocket_connections",
        "backlog_audio_s", "audio_continuity_ok_total", "frame_step_s",
    ):  # fmt: skip
        assert f"# TYPE megakernel_tts:{name} " in reply.text
    assert server.metric('requests_success_total{finished_reason="stop"}') == before + 1
    assert 0.001 < server.metric("frame_step_s") < 10, "of the simulated engine"


def test_a_stream_that_is_being_opened_waits(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, may_open, aopen = threading.Event(), threading.Event(), server.tts.aopen

    async def held(*arguments: Any, **keywords: Any) -> Session:
        opening.set()
        await asyncio.to_thread(may_open.wait)
        return await aopen(*arguments, **keywords)

    monkeypatch.setattr(server.tts, "aopen", held)
    with ThreadPoolExecutor() as pool:
        speech = pool.submit(httpx.post, f"{server.url}/v1/audio/speech", json={"input": TEXT})
        try:
            assert opening.wait(TIMEOUT_S)
            counts = [server.metric(f"num_requests_{state}") for state in ("waiting", "running")]
        finally:
            may_open.set()
        assert counts == [1, 0]
        assert speech.result().status_code == 200


def test_cloned_voices_need_a_model_that_clones(engine: TTS) -> None:
    import torch

    voices = {"anna": Voice(torch.zeros(4))}
    with pytest.raises(ValueError, match="Base model"):
        Server(engine, ServerSettings(voices=voices))
