"""A short soak, and that it finds what it looks for."""

from collections.abc import Iterator

import pytest

from bench import pipecat_soak
from bench.pipecat_soak import soak
from bench.simulation import simulated_tts
from bench.soak_pipeline import RecordingService
from bench.virtual_time import observable_engines
from megakernel_tts import TTS


@pytest.fixture
def engine() -> Iterator[TTS]:
    with observable_engines(), simulated_tts(frame_seconds=0.001) as tts:
        tts.warmup()
        yield tts


def test_a_short_soak_passes_and_covers_every_condition(engine: TTS) -> None:
    report = soak(engine, 40, seed=5)
    assert report.passed and not report.violations, report
    assert report.counts["turns"] == 40
    conditions = ("interrupted", "lost_callers", "updates", "refused_updates", "text_stalls")
    assert all(report.counts.get(condition) for condition in conditions), report.counts
    assert report.counts["committed_words"] > 100
    assert report.counts["played_words_not_committed"] == 0


def test_words_that_were_not_played_are_found(engine: TTS, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are sent at once, as if gaps in the audio and its order of play did not matter.

    Every turn is interrupted long before its last word.
    """
    monkeypatch.setattr(RecordingService, "_add_word_timestamps", _add_words_at_once)
    monkeypatch.setattr(pipecat_soak, "_TEXTS", (" ".join(["word"] * 60) + ".",))
    monkeypatch.setattr(pipecat_soak, "_INTERRUPTED_SHARE", 1.0)
    report = soak(engine, 12, seed=2)
    assert not report.passed
    assert any("audio was not played" in violation for violation in report.violations)


async def _add_words_at_once(
    service: RecordingService,
    word_times: list[tuple[str, float]],
    context_id: str | None = None,
    includes_inter_frame_spaces: bool = False,
) -> None:
    at_once = [(word, 0.0) for word, _ in word_times]
    await super(RecordingService, service)._add_word_timestamps(
        at_once, context_id, includes_inter_frame_spaces
    )
