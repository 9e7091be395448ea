"""The benchmarks' programs, for a few seconds: what they measure at length must hold at once."""

import asyncio

from bench.pipecat_latency import measure_added
from bench.pipecat_load import run
from megakernel_tts import TTS


def test_conversations_with_barge_ins_leave_nothing_behind(engine: TTS) -> None:
    report = run(engine, conversations=10, turns=6)
    assert report.turns == 60 and 0 < report.interrupted < 60
    assert (report.contexts_left, report.speeches_left) == (0, 0)
    assert (report.tasks_left, report.sessions_left, report.slots_free) == (0, 0, True)


def test_the_service_adds_little_to_the_first_audio(engine: TTS) -> None:
    """The figure is in bench/results; here a wait that slipped in would be seen."""
    added = asyncio.run(measure_added(engine, 20, 0.02))
    assert added.added_p50 < 10
