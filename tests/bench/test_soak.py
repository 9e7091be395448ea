from collections.abc import Callable
from pathlib import Path

import pytest

from bench.soak import soak
from megakernel_tts import TTS


@pytest.mark.parametrize(
    ("kind", "sessions"),
    [
        ("custom_voice", 25),
        ("base", 25),
        pytest.param("custom_voice", 10_000, marks=pytest.mark.slow),
    ],
)
def test_short_sessions_leave_no_resources(
    checkpoint: Callable[..., Path], kind: str, sessions: int
) -> None:
    with TTS.load(checkpoint(kind, shallow=True), device="cpu", slots=8) as tts:
        report = soak(tts, sessions)
    assert 0 < report.cancelled < sessions and report.frames > sessions / 2
    assert (report.threads_left, report.tasks_left, report.sessions_left) == (0, 0, 0)
    assert report.slots_free
    if sessions >= 1000:  # the allocator warms up in the first few hundred sessions
        assert report.growth < 0.05
