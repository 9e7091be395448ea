"""Sends invalid and odd requests to a server with a simulated model, and checks what it does.

HTTP requests are made by Schemathesis from the server's own schema; half of them violate it. Their
replies must follow it. Messages of WebSockets and events of Wyoming are valid ones with changed
fields, or none at all; sockets are opened and closed at random. The command fails if the server
answers with an internal error, logs one, keeps a stream open, or speaks differently afterwards.

python -m bench.server_fuzz --http 20000 --messages 20000 --json bench/results/server-fuzz-cpu.json
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
import websockets
from hypothesis.strategies import SearchStrategy
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tqdm import tqdm
from websockets.typing import Subprotocol

from bench.cartesia import cartesia_message
from bench.fuzzing import NO_MESSAGES, FuzzConnection, FuzzReport, change, errors_in, rss_mb
from bench.report import write
from bench.running_server import served, wait_until
from bench.simulation import simulated_tts
from bench.wyoming_fuzz import send_events
from megakernel_tts import TTS
from megakernel_tts.server.app import Server
from megakernel_tts.server.serving import bind
from megakernel_tts.server.wyoming import WyomingService

_TEXT = "Hello there, my friend."
_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
_NO_HTTP = b"Invalid HTTP request received."  # uvicorn's reply, for example to a length of "x"
_CASES_OF_A_TEST = 500
_NUM_SOCKETS = 8
_CLOSED_SHARE, _ABORTED_SHARE = 0.01, 0.01  # of the messages, after which the socket is closed
_PORTION = 100  # messages, after which the sockets are read
_TIMEOUT_S = 60.0  # of a reply, of a handshake, and until all streams have ended

_CARTESIA = cartesia_message(
    "One two. ", language="en", add_timestamps=True, max_buffer_delay_ms=0, seed=1
)
_ELEVENLABS = (
    "/v1/text-to-speech/ryan/{}?output_format=pcm_24000&auto_mode=true&inactivity_timeout=1"
)
_APPEND = {"type": "input_text.append", "text": "One two. "}


@dataclass(frozen=True)
class Socket:
    """A kind of WebSocket.

    Attributes:
        path: Its path and query.
        messages: Valid messages.
        field: Field to which values are added at random, such as the name of a context.
        values: These values.
        subprotocol: Its subprotocol, or None.
    """

    path: str
    messages: list[dict[str, Any]]
    field: str
    values: Sequence[Any]
    subprotocol: Subprotocol | None = None


SOCKETS = {
    "cartesia": Socket(
        "/tts/websocket",
        [
            _CARTESIA | {"continue": False},
            _CARTESIA | {"continue": True},
            _CARTESIA | {"continue": True, "flush": True},
            _CARTESIA | {"transcript": "", "continue": False},
            {"cancel": True},
        ],
        "context_id",
        "abcdef",
    ),
    "elevenlabs multi": Socket(
        _ELEVENLABS.format("multi-stream-input"),
        [
            {"text": "One two. "},
            {"text": "One two. ", "flush": True},
            {"text": " ", "voice_settings": {"speed": 1.0}},
            {"text": ""},
            {"close_context": True},
            {"close_socket": True},
        ],
        "context_id",
        "abcdef",
    ),
    "elevenlabs": Socket(
        _ELEVENLABS.format("stream-input"),
        [{"text": "One two. "}, {"text": "One two. ", "flush": True}, {"text": " "}, {"text": ""}],
        "try_trigger_generation",
        [True, False],
    ),
    "nari": Socket(
        "/v1/audio/speech/ws",
        [
            {"type": "request.start", "voice": "ryan", "language": "en", "response_format": "pcm"},
            _APPEND,
            _APPEND,
            {"type": "input_text.end"},
            {"type": "response.cancel"},
        ],
        "sequence",
        range(3),
        Subprotocol("nari.speech.v1"),
    ),
}


def is_exempt(response: schemathesis.Response) -> bool:
    """Whether a reply need not follow the schema: the server is overloaded, or got no HTTP.

    Args:
        response: The reply.
    """
    if response.status_code == 503:
        return "retry-after" in response.headers
    return response.status_code == 400 and response.content == _NO_HTTP


def send_requests(url: str, num_cases: int, seed: int, report: FuzzReport) -> None:
    """Sends HTTP requests from the server's schema.

    Args:
        url: Base URL of the server.
        num_cases: Number of requests.
        seed: Of the generator.
        report: Counts the replies.
    """
    schema = schemathesis.openapi.from_dict(requests.get(f"{url}/openapi.json").json())
    operations = [each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)]
    variable = [each for each in operations if each.body or each.path_parameters]
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    tests = [(each, mode) for each in variable for mode in modes]
    num_left = num_cases
    with requests.Session() as session, tqdm(total=num_cases, disable=None) as progress:

        def send(case: schemathesis.Case) -> None:
            response = case.call(base_url=url, session=session, timeout=_TIMEOUT_S)
            report.http[response.status_code] += 1
            progress.update()
            if is_exempt(response):
                return
            try:
                case.validate_response(response, checks=_CHECKS)
            except (AssertionError, BaseExceptionGroup) as error:
                kind = f"{case.method} {case.path}: {response.status_code}"
                report.failures.setdefault(kind, f"{error!r:.2000}")

        for operation in operations:
            if operation not in variable:
                send(operation.Case())
        num_left -= len(operations) - len(variable)
        while num_left > 0:
            for operation, mode in tests:
                count = min(num_left, _CASES_OF_A_TEST, 1 + num_cases // len(tests))
                if count > 0:
                    _run(operation.as_strategy(generation_mode=mode), send, count, seed)
                num_left, seed = num_left - count, seed + 1


def _run(
    cases: SearchStrategy[schemathesis.Case],
    send: Callable[[schemathesis.Case], None],
    count: int,
    seed: int,
) -> None:
    """Sends a number of cases."""
    checks = hypothesis.HealthCheck
    settings = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[checks.too_slow, checks.filter_too_much, checks.data_too_large],
    )
    settings(hypothesis.seed(seed)(hypothesis.given(cases)(send)))()


def random_message(rng: random.Random, kind: Socket) -> str | bytes:
    """Returns a message for a WebSocket: valid, changed, or none at all.

    Args:
        rng: Source of randomness.
        kind: Kind of the WebSocket.
    """
    if rng.random() < 0.05:
        return rng.choice(NO_MESSAGES)
    message = rng.choice(kind.messages) | {kind.field: rng.choice(kind.values)}
    if rng.random() < 0.5:
        message = change(rng, message)
    return json.dumps(message)


class _WebSocket(FuzzConnection):
    """A WebSocket; see `FuzzConnection`."""

    def __init__(self, websocket: websockets.ClientConnection, report: FuzzReport) -> None:
        self._websocket = websocket
        super().__init__(report)

    async def received(self) -> AsyncIterator[str]:
        """See `FuzzConnection`."""
        with suppress(websockets.ConnectionClosed):
            async for data in self._websocket:
                yield _kind_of(data)

    async def send(self, message: str | bytes) -> None:
        """Sends a message; does nothing once the connection is closed."""
        with suppress(websockets.ConnectionClosed):
            await self._websocket.send(message)

    def abort(self) -> None:
        """See `FuzzConnection`."""
        self._websocket.transport.abort()

    async def disconnect(self) -> None:
        """See `FuzzConnection`."""
        await self._websocket.close()


def _kind_of(data: str | bytes) -> str:
    """The kind of an event: its type and code if it has them, else its fields."""
    if isinstance(data, bytes):
        return "binary"
    event = json.loads(data)
    error = event.get("error")
    code = event.get("error_code") or (error.get("code") if isinstance(error, dict) else error)
    return " ".join(filter(None, (event.get("type") or ", ".join(event), code)))


async def send_messages(
    authority: str, kind: Socket, num_messages: int, rng: random.Random, report: FuzzReport
) -> None:
    """Sends messages over several WebSockets, which are closed at random.

    Args:
        authority: Host and port of the server.
        kind: Kind of the WebSockets.
        num_messages: Number of messages.
        rng: Source of randomness.
        report: Counts the events.
    """
    subprotocols = [kind.subprotocol] if kind.subprotocol else None
    sockets: list[_WebSocket] = []
    settled_mb = 0.0
    for i in tqdm(range(num_messages), disable=None):
        if len(sockets) < _NUM_SOCKETS:
            url = f"ws://{authority}{kind.path}"
            websocket = await websockets.connect(
                url, subprotocols=subprotocols, open_timeout=_TIMEOUT_S
            )
            sockets.append(_WebSocket(websocket, report))
            report.sockets += 1
        socket = rng.choice(sockets)
        await socket.send(random_message(rng, kind))
        report.messages += 1
        draw = rng.random()
        if socket.closed or draw < _CLOSED_SHARE + _ABORTED_SHARE:
            sockets.remove(socket)
            await socket.close(abort=draw < _ABORTED_SHARE)
        if i % _PORTION == 0:
            await asyncio.sleep(0)  # readers run
        if i == num_messages // 5:
            settled_mb = rss_mb()
    for socket in sockets:
        await socket.close()
    report.rss_growth_mb += rss_mb() - settled_mb


def fuzz(tts: TTS, num_requests: int, num_messages: int, seed: int = 0) -> FuzzReport:
    """Sends requests and messages to a server, and checks that it is as before at the end.

    Args:
        tts: Engine of the server.
        num_requests: HTTP requests.
        num_messages: Messages of each kind of WebSocket, and events of Wyoming.
        seed: Of the generators.
    """
    report, start_s = FuzzReport(), time.monotonic()
    with bind("127.0.0.1", 0) as listener:
        server = Server(tts, wyoming=WyomingService(listener))
        with served(server) as authority, errors_in(report.failures):
            url = f"http://{authority}"
            send_requests(url, num_requests, seed, report)
            for kind in SOCKETS.values():
                messages = send_messages(authority, kind, num_messages, random.Random(seed), report)
                asyncio.run(messages)
            address = listener.getsockname()
            asyncio.run(send_events(address, num_messages, random.Random(seed), report))
            _check(server, tts, url, report)
    report.seconds = time.monotonic() - start_s
    return report


def _check(server: Server, tts: TTS, url: str, report: FuzzReport) -> None:
    """Checks that the server is as before."""
    try:
        wait_until(lambda: server.streams.num_open == 0, _TIMEOUT_S)
    except TimeoutError:
        report.failures["streams stay open"] = str(server.streams.num_open)
    if 'finished_reason="error"' in (text := server.streams.metrics.text()):
        report.failures["speech failed"] = text
    body = {"input": _TEXT, "response_format": "pcm"}
    reply = requests.post(f"{url}/v1/audio/speech", json=body, timeout=_TIMEOUT_S)
    if reply.content != tts.say(_TEXT).pcm.tobytes():
        report.failures["speech differs afterwards"] = f"status {reply.status_code}"


def main() -> int:
    """Runs the command line; returns 1 if there is a failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--http", type=int, default=2_000, help="requests (default: 2000)")
    parser.add_argument(
        "--messages",
        type=int,
        default=8_000,
        help="messages of each WebSocket, and events of Wyoming (default: 8000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the generators (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    options = parser.parse_args()
    with simulated_tts(frame_seconds=0.0) as tts:
        tts.warmup()
        report = fuzz(tts, options.http, options.messages, options.seed)
    figures = {"command": "bench.server_fuzz", "seed": options.seed, **vars(report)}
    write(figures, options.json, ("schemathesis", "uvicorn", "starlette", "websockets"))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
