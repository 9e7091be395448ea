import asyncio
import random

import pytest

from bench import server_soak
from bench.server_soak import ServerSoakReport, soak
from bench.simulation import simulated_tts
from bench.virtual_time import run_in_virtual_time
from megakernel_tts.server.speech_stream import SpeechStream


@pytest.mark.parametrize("sessions", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_sessions_that_end_at_random_leave_nothing(sessions: int) -> None:
    with simulated_tts(frame_seconds=0.0) as tts:
        tts.warmup()
        report = soak(tts, sessions)
    assert report.released and not report.failures, report
    assert sum(report.sessions.values()) == sessions
    assert {*report.sessions} == {"http", "cartesia", "elevenlabs", "nari"}
    assert 0.3 * sessions < report.disconnected < 0.7 * sessions
    if sessions >= 1000:  # before, the allocator warms up
        assert report.growth < 0.05


def test_a_stream_that_stays_open_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeechStream, "close", lambda stream: None)
    monkeypatch.setattr(server_soak, "_RELEASE_TIMEOUT_S", 0.1)
    with simulated_tts(frame_seconds=0.0) as tts:
        tts.warmup()
        report = soak(tts, 20)
    assert not report.released and report.streams_left > 0


@pytest.mark.parametrize("others", [True, False], ids=["others end", "nothing ends"])
def test_a_session_may_wait_as_long_as_others_end(
    monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """A batch waits while there are sessions of higher priority, and then it must end."""
    timeout_s = 0.4

    async def session(_: str, port: int, rng: random.Random, report: ServerSoakReport) -> None:
        index = report.sessions.total()
        report.sessions["http"] += 1
        await asyncio.sleep(2 * timeout_s if index == 0 else index * timeout_s / 4 * others)

    for name in ("_request", "_converse"):
        monkeypatch.setattr(server_soak, name, session)
    monkeypatch.setattr(server_soak, "_SESSION_TIMEOUT_S", timeout_s)
    report = ServerSoakReport()
    run_in_virtual_time(server_soak._run_all("localhost:1", 10, 0, report), 10 * timeout_s)
    assert bool(report.failures) is not others
