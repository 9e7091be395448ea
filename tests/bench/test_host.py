"""The program that measures the host's time, over its simulated device."""

import json
import sys
from pathlib import Path

import pytest

from bench.host import HostTimes, host_tts, main, measure


def test_the_command_measures_each_size_of_chunks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    options = ["--streams", "9", "--requests", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench.host", *options])
    main()
    content = json.loads(file.read_text(encoding="utf-8"))
    assert (content["command"], content["model"]) == ("bench.host", "simulated")
    assert content["times_ms"] == {"frame": 4.5, "prompt": 0.05, "codec": 1.2}
    rows = content["host"]
    assert [(row["streams"], row["chunk_frames"]) for row in rows] == [(9, 2), (9, 4), (9, 8)]
    assert {row["pace"] for row in rows} == {"without pauses"}
    assert all(0 < row["engine_core_share"] <= row["process_core_share"] for row in rows)
    assert content["event_loop_ms"]["streams"] == 9


def test_live_streams_are_read_at_the_pace_of_playback() -> None:
    """As many seconds of audio per second as streams, less the time until their first chunks."""
    with host_tts(HostTimes(), 2) as tts:
        row = measure(tts, 2, 8, 1, "live")
    assert (row.pace, row.chunk_frames) == ("live", 8)
    assert 1 < row.audio_seconds_per_second <= 2


def test_a_size_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.host", "--model", "9B"])
    with pytest.raises(SystemExit):
        main()
