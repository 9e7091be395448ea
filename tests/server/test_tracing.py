import asyncio
from collections.abc import Iterator, Sequence

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from bench.simulation import simulated_tts
from megakernel_tts import TTS
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.tracing import Tracing
from tests.fakes import TIMEOUT_S
from tests.server.running import TEXT, RunningServer, connected, running_server, until, wait_until

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(engine: TTS, exporter: InMemorySpanExporter) -> Iterator[RunningServer]:
    """A server whose spans are kept."""
    tracing = Tracing("simulated", SimpleSpanProcessor(exporter))
    with running_server(engine, tracing=tracing) as server:
        yield server
    tracing.close()


def by_name(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def post(server: RunningServer) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT}, headers=HEADERS)


def test_a_request_is_a_span_of_the_caller_s_trace(
    traced: RunningServer, exporter: InMemorySpanExporter
) -> None:
    reply = post(traced)
    spans = by_name(exporter.get_finished_spans())
    assert set(spans) == {"speech simulated", "first_audio", "stream"}
    request = spans["speech simulated"]
    assert request.kind is SpanKind.SERVER and request.parent is not None
    assert f"{request.parent.span_id:016x}" == SPAN_ID
    assert {trace_of(span) for span in spans.values()} == {TRACE_ID}
    attributes = dict(request.attributes or {})
    assert attributes["gen_ai.operation.name"] == "speech"
    assert attributes["gen_ai.request.model"] == "simulated"
    assert attributes["megakernel_tts.request_id"] == reply.headers["x-request-id"]
    assert attributes["megakernel_tts.characters"] == len(TEXT)
    assert attributes["megakernel_tts.voice"] == "ryan"
    assert attributes["megakernel_tts.cancelled"] is False
    assert isinstance(attributes["megakernel_tts.first_audio_ms"], float)


def test_the_children_divide_the_time_of_the_request(
    traced: RunningServer, exporter: InMemorySpanExporter
) -> None:
    post(traced)
    spans = by_name(exporter.get_finished_spans())
    request, first, stream = (spans[n] for n in ("speech simulated", "first_audio", "stream"))
    assert first.start_time == request.start_time and first.end_time == stream.start_time
    assert stream.end_time == request.end_time
    for child in (first, stream):
        assert child.parent == request.context


def test_a_context_of_a_websocket_is_a_span_of_the_socket_s_trace(
    traced: RunningServer, exporter: InMemorySpanExporter
) -> None:
    async def act() -> None:
        async with connected(traced, additional_headers=HEADERS) as client:
            await client.send("a", TEXT * 500)
            await client.receive()
            await client.cancel("a")

    asyncio.run(act())
    wait_until(lambda: traced.num_streams == 0)
    request = by_name(exporter.get_finished_spans())["speech simulated"]
    assert trace_of(request) == TRACE_ID
    assert dict(request.attributes or {})["megakernel_tts.cancelled"] is True
    assert request.status.status_code is StatusCode.UNSET


def test_waiting_for_a_slot_is_a_span_and_a_refusal_an_error(
    exporter: InMemorySpanExporter,
) -> None:
    tracing = Tracing("simulated", SimpleSpanProcessor(exporter))

    async def act(server: RunningServer) -> None:
        async with connected(server) as client:
            await client.send("first", TEXT * 500)
            await client.receive()
            await client.send("second", TEXT * 30)  # a longer text would take a thread
            await client.send("third", TEXT)
            assert (await client.until_done("third"))[-1]["status_code"] == 429
            await until(lambda: any(stream.events.slot_wait_s for stream in scheduler.streams))
            await client.cancel("first")
            while (await client.receive())["context_id"] != "second":
                pass

    settings = ServerSettings(max_queue=1, queue_timeout_s=TIMEOUT_S)
    with simulated_tts(num_slots=1, frame_seconds=0.001) as tts:
        tts.warmup()
        scheduler = tts._loaded.engine._loop.scheduler
        with running_server(tts, settings, tracing=tracing) as server:
            asyncio.run(act(server))
            wait_until(lambda: server.num_streams == 0)
    spans = exporter.get_finished_spans()
    (queue,) = [span for span in spans if span.name == "queue"]
    assert queue.end_time is not None and queue.start_time is not None
    assert queue.end_time > queue.start_time
    (refused,) = [span for span in spans if span.status.status_code is StatusCode.ERROR]
    assert refused.status.description == "overload"
    assert not [span for span in spans if span.parent and span.parent == refused.context]
