"""Conversations with recognition and synthesis, on devices with fixed times."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import conversations
from bench.conversation_figures import (
    ConversationFigures,
    RecognitionFigures,
    SynthesisFigures,
    Targets,
    table,
)
from bench.conversations import Workload, main, measure
from bench.realtime_recognition import simulated_stt
from bench.simulation import simulated_tts

NO_TARGETS = Targets(None, 60_000.0, 60_000.0)
TWO = Workload(2, 1.0, 80, 0.02, (0.1, 0.2), 3, 2)


def test_both_are_measured_beside_each_other() -> None:
    # Speech of 0.24 s takes 0.15 s, in which both streams have chunks.
    with simulated_stt(2, (0.001, 0.0)) as stt, simulated_tts(2, 0.05) as tts:
        figures = asyncio.run(measure(stt, tts, TWO, NO_TARGETS))
    recognition, synthesis = figures.recognition, figures.synthesis
    assert recognition is not None and synthesis is not None
    # A stream of 1 s has 12 whole chunks; the first needs less audio than the others.
    assert 2 * 11 <= recognition.chunks <= 2 * 13
    assert 0 < recognition.chunks_beside_synthesis < recognition.chunks
    assert 1.0 <= recognition.audio_to_tokens_ms["p50"] <= recognition.audio_to_tokens_ms["max"]
    assert 0 < recognition.results <= recognition.chunks
    assert recognition.finals == synthesis.replies > 0
    assert recognition.finalize_to_final_ms["p50"] >= 1.0
    assert synthesis.first_chunk_ms["p50"] >= 50.0
    assert synthesis.audio_s == pytest.approx(0.24 * synthesis.replies, abs=0.01)


def test_each_is_measured_without_the_other() -> None:
    with simulated_stt(2, (0.001, 0.0)) as stt, simulated_tts(2, 0.005) as tts:
        one = asyncio.run(measure(stt, None, TWO, NO_TARGETS))
        other = asyncio.run(measure(None, tts, TWO, NO_TARGETS))
    assert one.synthesis is None and one.recognition is not None
    assert one.recognition.finals > 0 and one.recognition.chunks_beside_synthesis == 0
    assert other.recognition is None and other.synthesis is not None
    assert other.synthesis.replies > 0


def test_targets_of_a_chunk_depend_on_its_length_and_the_number_of_streams() -> None:
    assert Targets.make(1, 80, 100.0) == Targets(2.0, 30.0, 100.0)
    assert Targets.make(8, 80, 100.0).tokens_p99_ms == 5.0
    assert Targets.make(8, 160, 100.0).tokens_p99_ms is None
    assert Targets.make(65, 80, 100.0).tokens_p99_ms is None


def times_ms(largest: float) -> dict[str, float]:
    return {"p50": 1.0, "p95": largest, "p99": largest, "max": largest}


def recognition_figures(tokens_ms: float, final_ms: float) -> RecognitionFigures:
    tokens, final = times_ms(tokens_ms), times_ms(final_ms)
    return RecognitionFigures(9, tokens, 0, {}, 4, times_ms(7.0), times_ms(0.5), 0.35, 2, final)


def test_missed_targets_are_named_in_the_table() -> None:
    targets = Targets(5.0, 30.0, 100.0)
    assert recognition_figures(5.0, 30.0).missed(targets) == []
    assert recognition_figures(5.1, 30.1).missed(targets) == [
        "audio to tokens",
        "finalize to Final",
    ]
    late = SynthesisFigures(3, times_ms(100.1), 12.0, 1, 1, 8.5)
    assert late.missed(targets) == ["first chunk", "underruns"]
    nothing = SynthesisFigures(0, {}, 0.0, 0, 0, 0.0)
    assert nothing.missed(targets) == ["first chunk"], "a time without a measurement is missed"
    runs = {
        "recognition": ConversationFigures(recognition_figures(4.0, 12.0), None, 0.1, []),
        "synthesis": ConversationFigures(None, late, 0.2, late.missed(targets)),
    }
    lines = {line[:30].strip(): line[30:].split() for line in table(runs, targets).splitlines()}
    assert lines["audio to tokens"] == ["p99", "5", *"1 / 4 / 4 / 4 -".split()]
    assert lines["finalize to Final"] == ["max", "30", *"1 / 12 / 12 / 12 -".split()]
    assert lines["first chunk"] == ["p95", "100", "-", *"1 / 100.1 / 100.1 / 100.1".split()]
    assert lines["underruns (longest gap, ms)"] == ["0", "-", "1", "(8.5)"]
    assert lines["chunks, finals, replies"] == ["-", *"9, 2, - -, -, 3".split()]
    assert lines["within targets"] == ["yes", "no:", "first", "chunk,", "underruns"]


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.conversations", *options])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        main()
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_the_command_writes_all_three_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversations, "_SPEECH_S", (0.1, 0.2))
    monkeypatch.setattr(conversations, "_REPLY_FRAMES", 2)
    file = tmp_path / "conversations.json"
    options = ["--conversations", "1", "--duration", "0.5", "--json", str(file)]
    run(monkeypatch, "--simulated", "--step-ms", "1", *options)
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["workload"]["conversations"] == 1 and report["step_ms"] == 1.0
    assert report["backend"] == "simulated" and "gpu" not in report
    measured = {
        name: (each["recognition"] is not None, each["synthesis"] is not None)
        for name, each in report["runs"].items()
    }
    assert measured == {
        "recognition": (True, False),
        "synthesis": (False, True),
        "both": (True, True),
    }
    assert "within targets" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "0.6B needs a GPU; --simulated runs without one"),
        (["--duration", "7"], "--duration 7: a turn takes up to 8 s"),
        (["--jitter-ms", "-1"], "--jitter-ms -1 is not from 0 to 1000"),
        (["--conversations", "0"], "'0' is not a whole number of 1 or more"),
        (["--lookahead-ms", "100"], "invalid choice: 100"),
        (["--simulated", "--json", "missing/x.json"], "missing is not a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(conversations.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *options)
    assert message in capsys.readouterr().err
