import pytest

from bench import server_soak
from bench.server_soak import soak
from bench.simulation import simulated_tts
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
