"""The log of streams that fail."""

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Iterator

import pytest

from megakernel_tts import TTS, SynthesisError
from megakernel_tts.server.errors import EngineProcessError
from megakernel_tts.server.failures import FailureLog
from megakernel_tts.server.logs import JsonFormatter, TextFormatter
from tests.server.failing import REASON, failing, read_until_failure
from tests.server.running import running_server

NUM_STREAMS = 3
TEXT_OF_ERROR = f"Speaking failed: {REASON}"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log as the server shows it."""
    with caplog.at_level(logging.WARNING), caplog.at_level(logging.INFO, "megakernel_tts.server"):
        yield caplog


def errors_of(log: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in log.records if record.levelno >= logging.ERROR]


def test_a_failure_of_several_streams_has_one_line_with_its_reason(
    engine: TTS, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    due, backend = threading.Event(), engine._loaded.engine.backend
    monkeypatch.setattr(backend, "step", failing(backend.step, NUM_STREAMS, due.is_set))
    with running_server(engine) as server:
        asyncio.run(read_until_failure(server, NUM_STREAMS, due.set))
        assert server.metric('requests_success_total{finished_reason="error"}') == NUM_STREAMS
        (failure,) = errors_of(log)  # none of uvicorn
        due.clear()
        asyncio.run(read_until_failure(server, NUM_STREAMS, due.set))
    assert len(errors_of(log)) == 2, "another failure with the same reason"
    line = TextFormatter().format(failure)
    assert line.endswith(f'ERROR synthesis has failed error="{TEXT_OF_ERROR}"')
    assert json.loads(JsonFormatter().format(failure))["error"] == TEXT_OF_ERROR
    ends = [record.fields for record in log.records if record.getMessage() == "speech"]  # type: ignore[attr-defined]
    assert len(ends) == 2 * NUM_STREAMS
    for fields in ends:
        assert (fields["finish_reason"], fields["error"]) == ("error", "synthesis_failed")


def test_a_mistake_has_its_traceback_once(log: pytest.LogCaptureFixture) -> None:
    failures, opened_s = FailureLog(), time.monotonic()
    for number in range(2):
        error = SynthesisError("Speaking failed: a mistake")
        error.__cause__ = ZeroDivisionError(f"of stream {number}")
        failures.add(error, opened_s)
    (record,) = errors_of(log)
    assert "ZeroDivisionError: of stream 0" in TextFormatter().format(record)


def test_different_failures_are_logged_separately(log: pytest.LogCaptureFixture) -> None:
    failures, opened_s = FailureLog(), time.monotonic()
    reasons = ["one", "other", "one", "other"]
    for reason in reasons:
        failures.add(SynthesisError(reason), opened_s)
    failures.add(SynthesisError("one"), math.inf)  # the stream was opened after that failure
    failures.add(EngineProcessError("its process has logged this"), opened_s)
    assert [record.fields for record in errors_of(log)] == [  # type: ignore[attr-defined]
        {"error": "one"},
        {"error": "other"},
        {"error": "one"},
    ]
    assert not any(record.exc_info for record in errors_of(log))


def test_few_texts_of_failures_are_kept(log: pytest.LogCaptureFixture) -> None:
    failures, opened_s = FailureLog(), time.monotonic()
    for number in range(1000):
        failures.add(SynthesisError(f"failure {number}"), opened_s)
        failures.add(SynthesisError(f"failure {number}"), opened_s)
    assert len(errors_of(log)) == 1000
    assert len(failures._logged_s) < 100
