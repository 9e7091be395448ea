from collections.abc import Callable
from pathlib import Path

import pytest

from bench.soak import soak
from megakernel_tts import TTS


@pytest.mark.parametrize(
    ("kind", "sessions"),
    [
        ("custom_voice", 100),
        ("base", 100),
        pytest.param("custom_voice", 10_000, marks=pytest.mark.slow),
    ],
)
def test_short_sessions_leave_nothing_behind(
    checkpoint: Callable[..., Path], kind: str, sessions: int
) -> None:
    with TTS.load(checkpoint(kind), device="cpu", slots=8) as tts:
        report = soak(tts, sessions)
    assert 0 < report.cancelled < sessions and report.frames > sessions / 2
    assert (report.threads_left, report.tasks_left, report.sessions_left) == (0, 0, 0)
    assert report.slots_free
    if sessions >= 1000:  # a few hundred sessions are still warming the allocator up
        assert report.growth < 0.05
