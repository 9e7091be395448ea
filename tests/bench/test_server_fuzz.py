import random
from typing import Any

import pytest
import requests
import schemathesis

from bench.running_server import served
from bench.server_fuzz import SOCKETS, fuzz, is_exempt, random_message
from bench.simulation import simulated_tts
from bench.wyoming_fuzz import random_events
from megakernel_tts.server.app import Server


@pytest.mark.parametrize(
    ("num_requests", "num_messages"),
    [(60, 300), pytest.param(20_000, 20_000, marks=pytest.mark.slow)],
)
def test_odd_requests_and_messages_meet_no_internal_error(
    num_requests: int, num_messages: int
) -> None:
    with simulated_tts(frame_seconds=0.0) as tts:
        tts.warmup()
        report = fuzz(tts, num_requests, num_messages)
    assert not report.failures
    assert sum(report.http.values()) == num_requests
    assert report.http[200] and report.http[400]
    assert report.messages == num_messages * (len(SOCKETS) + 1)
    assert report.events["chunk"] and report.events["done"]
    assert report.events["audio-chunk"] and report.events["synthesize-stopped"]
    assert report.events["error invalid_value"] and report.events["info"]
    assert num_messages < 10_000 or report.rss_growth_mb < 20


def test_a_failing_server_fails() -> None:
    with simulated_tts(frame_seconds=0.0) as tts:
        tts.warmup()
        tts._loaded.engine.backend.failing_word = "One"  # type: ignore[attr-defined]
        report = fuzz(tts, 0, 100)
    assert "speech failed" in report.failures


def test_replies_to_an_overload_and_to_what_is_no_http_need_not_follow_the_schema() -> None:
    with simulated_tts(frame_seconds=0.0) as tts, served(server := Server(tts)) as authority:

        def exempt(method: str, path: str, status: int, **fields: Any) -> bool:
            reply = requests.request(method, f"http://{authority}{path}", **fields)
            assert reply.status_code == status
            return is_exempt(schemathesis.Response.from_any(reply))

        assert exempt("GET", "/v1/models/none", 400, headers={"Content-Length": 'yB"w'})
        assert not exempt("GET", "/v1/models/none", 404)
        assert not exempt("POST", "/v1/audio/speech", 400, json=[])
        server.streams.draining = True
        assert exempt("POST", "/v1/audio/speech", 503, json={"input": "One."})
        assert not exempt("GET", "/ready", 503)


def test_events_follow_from_the_seed() -> None:
    first, second = random.Random(1), random.Random(1)
    events = [random_events(first) for _ in range(100)]
    assert events == [random_events(second) for _ in range(100)]
    assert len({event for sequence in events for event in sequence}) > 20


@pytest.mark.parametrize("kind", SOCKETS)
def test_messages_follow_from_the_seed(kind: str) -> None:
    first, second = random.Random(1), random.Random(1)
    messages = [random_message(first, SOCKETS[kind]) for _ in range(100)]
    assert messages == [random_message(second, SOCKETS[kind]) for _ in range(100)]
    assert len({*messages}) > 20
