"""What became of each request for speech: metrics, a line in the log, and spans."""

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Scope

from megakernel_tts.server.accounts import Account
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.keys import Priority
from megakernel_tts.server.metrics import Metrics

if TYPE_CHECKING:
    from megakernel_tts.server.tracing import Tracing

_log = logging.getLogger("megakernel_tts.server.requests")

_CONTINUOUS_S = 0.1  # underrun up to which a stream counts as continuous
_SPOKEN = ("stop", "length")
_TRACE_HEADERS = ("traceparent", "tracestate")


def new_request_id() -> str:
    """An identifier of a request."""
    return f"req_{uuid.uuid4().hex}"


@dataclass(frozen=True)
class Caller:
    """Who requests speech, and through what.

    Attributes:
        protocol: Name of the protocol.
        request_id: Identifier of the request, or of its socket.
        account: The account of the key.
        trace_headers: W3C headers of the caller's trace, if it has one.
    """

    protocol: str
    request_id: str
    account: Account
    trace_headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, scope: Scope, protocol: str) -> "Caller":
        """The caller of an HTTP request or a WebSocket."""
        headers = Headers(scope=scope)
        trace = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
        state = scope["state"]
        return cls(protocol, state["request_id"], state["account"], trace)


@dataclass(kw_only=True)
class SpeechReport:
    """A request for speech, from its arrival to its end.

    Attributes:
        caller: Who requests it.
        voice: Name of its voice.
        priority: Its class.
        start_s: Time of its arrival, of the monotonic clock.
        num_characters: Length of its text so far.
        slot_wait_s: Seconds for which it waited for its first audio because all slots were in use.
        first_audio_s: Seconds from its arrival to its first audio; None before.
        audio_s: Seconds of audio so far.
        underrun_s: Seconds for which playback waited for audio.
        elapsed_s: Seconds from its arrival to its end.
        outcome: `stop` (spoken), `length` (cut off), `abort` (by the client), `invalid`, `error`,
            or the reason of its refusal.
        error: Code of the error that ended it, `slow_client` if the client did not read its audio;
            None if there was none.
    """

    caller: Caller
    voice: str
    priority: Priority
    start_s: float = field(default_factory=time.monotonic)
    num_characters: int = 0
    slot_wait_s: float = 0.0
    first_audio_s: float | None = None
    audio_s: float = 0.0
    underrun_s: float = 0.0
    elapsed_s: float = 0.0
    outcome: str = ""
    error: str | None = None

    def fields(self) -> dict[str, str | int | float]:
        """What the log shows: neither text nor keys."""
        first_audio_ms = None if self.first_audio_s is None else round(1000 * self.first_audio_s, 1)
        values: dict[str, str | int | float | None] = {
            "request_id": self.caller.request_id,
            "protocol": self.caller.protocol,
            "key": self.caller.account.name or None,
            "priority": self.priority.name.lower(),
            "voice": self.voice or None,
            "characters": self.num_characters,
            "slot_wait_ms": round(1000 * self.slot_wait_s, 1),
            "first_audio_ms": first_audio_ms,
            "audio_s": round(self.audio_s, 2),
            "underrun_ms": round(1000 * self.underrun_s, 1),
            "duration_s": round(self.elapsed_s, 3),
            "finish_reason": self.outcome,
            "error": self.error,
        }
        return {name: value for name, value in values.items() if value is not None}


class Reporter:
    """Writes reports to metrics, log and traces."""

    def __init__(self, metrics: Metrics, tracing: "Tracing | None") -> None:
        """Takes over what it writes to.

        Args:
            metrics: Metrics of the server.
            tracing: Receives spans; None for no traces.
        """
        self._metrics = metrics
        self._tracing = tracing

    def accepted(self, report: SpeechReport) -> None:
        """Reports that a stream was opened."""
        self._metrics.accepted.add(report.caller.account.name)

    def text(self, report: SpeechReport, num_characters: int) -> None:
        """Reports text of a stream."""
        report.num_characters += num_characters
        self._metrics.characters.add(report.caller.account.name, amount=num_characters)

    def first_audio(self, report: SpeechReport, slot_wait_s: float) -> None:
        """Reports the first audio of a stream, which waited for a slot before."""
        report.first_audio_s = time.monotonic() - report.start_s
        report.slot_wait_s = slot_wait_s
        self._metrics.first_audio_s.observe(report.first_audio_s)
        self._metrics.slot_wait_s.observe(slot_wait_s)

    def finished(self, report: SpeechReport, outcome: str) -> None:
        """Reports the end of a stream that was opened: spoken, cut off or aborted."""
        self._end(report, outcome)
        metrics = self._metrics
        metrics.finished.add(outcome)
        if outcome not in _SPOKEN:
            return
        metrics.latency_s.observe(report.elapsed_s)
        metrics.audio_s.observe(report.audio_s)
        if report.audio_s:
            metrics.real_time_factor.observe(report.elapsed_s / report.audio_s)
        metrics.underrun_s.observe(report.underrun_s)
        if report.underrun_s <= _CONTINUOUS_S:
            metrics.continuity_ok.add("100")

    def failed(self, report: SpeechReport, error: RequestError) -> None:
        """Reports that a request was refused, or its speech failed."""
        report.error = error.code
        self._end(report, error.reason or ("error" if error.status >= 500 else "invalid"))
        if error.reason:
            self._metrics.rejected.add(error.reason, report.caller.account.name)
        elif error.status >= 500:
            self._metrics.finished.add("error")

    def _end(self, report: SpeechReport, outcome: str) -> None:
        report.elapsed_s = time.monotonic() - report.start_s
        report.outcome = outcome
        if _log.isEnabledFor(logging.INFO):
            _log.info("speech", extra={"fields": report.fields()})
        if self._tracing is not None:
            self._tracing.record(report)
