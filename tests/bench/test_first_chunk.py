"""First chunks beside streams that speak, with a simulated engine."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.first_chunk import Pace, main, measure
from bench.running_server import wait_until
from bench.simulation import simulated_tts
from megakernel_tts import EngineClosedError, Session

_FRAME_S = 0.002


@pytest.mark.parametrize("pace", ["without pauses", "live"])
def test_streams_speak_during_all_requests(pace: Pace) -> None:
    with simulated_tts(4, _FRAME_S) as tts:
        row = asyncio.run(measure(tts, 3, pace, requests=5, interval_s=0.05))
    assert row.requests == 5 and row.first_chunk_ms["p50"] >= 1000 * _FRAME_S
    assert row.active_frames_per_second > 0
    if pace == "live":  # 12.5 frames per second each, and what is sent before it is played
        assert row.active_frames_per_second < 3 * 12.5 * 4


def test_new_streams_of_a_burst_are_opened_together() -> None:
    with simulated_tts(6, _FRAME_S) as tts:
        num_open: list[int] = []
        aopen = tts.aopen

        async def record(**arguments: Any) -> Session:
            session = await aopen(**arguments)
            num_open.append(tts._loaded.engine.num_sessions)
            return session

        tts.aopen = record  # type: ignore[method-assign]
        row = asyncio.run(measure(tts, 2, "live", requests=3, interval_s=0.05, burst=4))
    assert row.burst == 4 and max(num_open) == 6
    assert len(num_open) >= 2 + 3 * 4


@pytest.mark.parametrize(("pace", "least_ms"), [("live", 30.0), ("without pauses", 0.0)])
def test_chunks_that_are_not_there_in_time_are_waited_for(pace: Pace, least_ms: float) -> None:
    """A frame of 80 ms is made in 120."""
    with simulated_tts(2, 0.12) as tts:
        row = asyncio.run(measure(tts, 1, pace, requests=2, interval_s=0.3))
    assert row.longest_wait_ms >= least_ms
    assert (row.longest_wait_ms > 0) == (pace == "live")


@pytest.mark.parametrize("pace", ["without pauses", "live"])
def test_every_session_is_closed(pace: Pace) -> None:
    with simulated_tts(3, _FRAME_S) as tts:
        opened, aopen = list[Session](), tts.aopen

        async def record(**arguments: Any) -> Session:
            opened.append(await aopen(**arguments))
            return opened[-1]

        tts.aopen = record  # type: ignore[method-assign]
        asyncio.run(measure(tts, 2, pace, requests=2, interval_s=0.01))
        assert len(opened) >= 4
        wait_until(lambda: not tts._loaded.engine.num_sessions)


def test_a_stream_that_fails_ends_the_measurement() -> None:
    with simulated_tts(3, _FRAME_S) as tts:
        tts.close()
        with pytest.raises(ExceptionGroup) as failed:
            asyncio.run(measure(tts, 2, "live", requests=2, interval_s=0.01))
    assert failed.group_contains(EngineClosedError)


def test_the_command_measures_each_number_of_streams(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    options = ["--simulated", "--active", "0,2", "--requests", "3", "--interval-ms", "5"]
    options += ["--burst", "2"]
    monkeypatch.setattr(sys, "argv", ["bench.first_chunk", *options, "--json", str(file)])
    main()
    rows = json.loads(file.read_text(encoding="utf-8"))["figures"]
    assert [(row["active"], row["pace"]) for row in rows] == [
        (0, "live"),
        (2, "live"),
        (2, "without pauses"),
    ]
    assert all(row["burst"] == 2 and row["first_chunk_ms"]["p50"] > 0 for row in rows)


@pytest.mark.parametrize("value", ["-1", "a", "1,", ""])
def test_a_number_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.first_chunk", "--active", value])
    with pytest.raises(SystemExit):
        main()
