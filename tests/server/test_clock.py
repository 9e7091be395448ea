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
from tests.server.running import TEXT, RunningServer, running_server

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
    bot = ApiKey(name="bot", key="limited", requests_per_minute=1)
    keys = (bot, ApiKey(name="admin", key="free"))
    settings = ServerSettings(api_keys=keys, queue_timeout_s=TIMEOUT_S)

    def post(server: RunningServer, key: str) -> httpx.Response:
        body = {"input": TEXT, "response_format": "pcm"}
        url = f"{server.url}/v1/audio/speech"
        return httpx.post(url, json=body, headers={"X-API-Key": key})

    with running_server(engine, settings) as running:
        assert post(running, "limited").status_code == 200
        refused = post(running, "limited")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) <= 60
        for _ in range(3):
            reply = post(running, "free")
            assert np.array_equal(np.frombuffer(reply.content, "<i2"), running.speech())


def test_only_stamps_use_the_wall_clock() -> None:
    for file in Path(server.__path__[0]).rglob("*.py"):
        names = {
            node.attr
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("time", "datetime")
        }
        assert file.name in _STAMPS or names <= {"monotonic", "perf_counter"}, file.name
