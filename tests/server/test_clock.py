"""Jumps of the wall clock change neither deadlines nor pace."""

import ast
import random
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from megakernel_tts import TTS, server
from megakernel_tts.server.keys import ApiKey
from megakernel_tts.server.settings import ServerSettings
from tests.fakes import TIMEOUT_S
from tests.server.running import TEXT, running_server

DAY_S = 86_400
_STAMPS = (
    "logs.py",
    "openai_voices.py",
    "tracing.py",
)  # modules that report when something was


def test_speech_and_limits_do_not_depend_on_the_wall_clock(
    engine: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, now_s = random.Random(0), time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + rng.uniform(-DAY_S, DAY_S))
    key = ApiKey(name="bot", key="secret", requests_per_minute=3)
    settings = ServerSettings(api_keys=(key,), queue_timeout_s=TIMEOUT_S)
    with running_server(engine, settings) as running:
        url, headers = f"{running.url}/v1/audio/speech", {"X-API-Key": "secret"}
        body = {"input": TEXT, "response_format": "pcm"}
        replies = [httpx.post(url, json=body, headers=headers) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
        assert int(replies[-1].headers["retry-after"]) <= 20
        for reply in replies[:3]:
            assert np.array_equal(np.frombuffer(reply.content, "<i2"), running.speech())


def test_only_stamps_use_the_wall_clock() -> None:
    for file in Path(server.__path__[0]).rglob("*.py"):
        names = {
            node.attr
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("time", "datetime")
        }
        assert file.name in _STAMPS or names <= {"monotonic", "perf_counter"}, file.name
