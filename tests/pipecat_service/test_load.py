"""Short runs of the benchmarks' programs."""

import asyncio

import pytest

from bench.pipecat_latency import measure_added
from bench.pipecat_load import run
from megakernel_tts import TTS


def test_conversations_with_barge_ins_leak_no_resources(engine: TTS) -> None:
    report = run(engine, conversations=10, turns=6)
    assert report.turns == 60 and 0 < report.interrupted < 60
    assert (report.contexts_left, report.speeches_left) == (0, 0)
    assert (report.tasks_left, report.sessions_left, report.slots_free) == (0, 0, True)


def test_added_latency_is_measured(engine: TTS) -> None:
    """`test_barge_in` tests in virtual time that the service waits for no timer."""
    added = asyncio.run(measure_added(engine, 20, 0.0))
    # A busy machine can delay the requests of one kind more than those of the other.
    assert min(added.engine_p50, added.service_p50) > 0
    difference = added.service_p50 - added.engine_p50
    assert added.added_p50 == pytest.approx(difference, abs=0.02)
