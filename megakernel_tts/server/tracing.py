"""Spans of requests, which OpenTelemetry sends to a collector; needs the extra `otel`."""

import time

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from megakernel_tts.server.reports import SpeechReport

_PREFIX = "megakernel_tts."
_FAILURES = ("error", "timeout", "overload", "limit", "draining")


class Tracing:
    """Sends a span for each request, in the caller's trace if it names one.

    Its children are `queue` (all slots were in use), `first_audio` and `stream` (from the first
    audio to the end). Spans are made at the end of a request, so that they cost it no time.
    """

    def __init__(self, model: str, processor: SpanProcessor | None = None) -> None:
        """Starts the sender, which OpenTelemetry's environment variables configure.

        Args:
            model: Name of the model.
            processor: Receives the spans; None sends them in batches through OTLP over HTTP.
        """
        own = Resource({"service.name": "megakernel-tts"})
        resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("megakernel_tts.server")
        self._model = model

    def record(self, report: SpeechReport) -> None:
        """Sends the spans of a request that has ended."""
        end_ns = time.time_ns()
        start_ns = end_ns - _ns(report.elapsed_s)
        parent = propagate.extract(report.caller.trace_headers)
        span = self._tracer.start_span(
            f"speech {self._model}",
            parent,
            SpanKind.SERVER,
            self._attributes(report),
            start_time=start_ns,
        )
        if report.outcome in _FAILURES:
            span.set_status(Status(StatusCode.ERROR, report.outcome))
        context = trace.set_span_in_context(span)
        queue_end_ns = start_ns + _ns(report.slot_wait_s)
        if report.slot_wait_s:
            self._add("queue", context, start_ns, queue_end_ns)
        if report.first_audio_s is not None:
            first_ns = start_ns + _ns(report.first_audio_s)
            self._add("first_audio", context, queue_end_ns, first_ns)
            self._add("stream", context, first_ns, end_ns)
        span.end(end_ns)

    def _attributes(self, report: SpeechReport) -> dict[str, AttributeValue]:
        return {
            "gen_ai.operation.name": "speech",
            "gen_ai.request.model": self._model,
            **{_PREFIX + name: value for name, value in report.fields().items()},
            _PREFIX + "cancelled": report.outcome == "abort",
        }

    def _add(self, name: str, parent: Context, start_ns: int, end_ns: int) -> None:
        self._tracer.start_span(name, parent, start_time=start_ns).end(end_ns)

    def close(self) -> None:
        """Sends the spans that are left."""
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
