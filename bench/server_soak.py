"""Runs many sessions whose clients disconnect at random, and reports what they leave behind.

A server with a simulated engine runs in this process. Sessions are HTTP requests, and conversations
over WebSockets with one to three contexts; more of them run at once than the engine has slots. Half
of the clients read to the end. The others cancel, close or abort the connection at a random point.
The command fails if a session stays open while no other one ends, if a stream, slot, socket,
thread or file descriptor is left, if the server logs an error, or if resident memory grows by more
than 5 % from the first tenth of the sessions on.

python -m bench.server_soak --sessions 10000 --json bench/results/server-soak-cpu.json
"""

import argparse
import asyncio
import ctypes
import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import websockets
from tqdm import tqdm
from websockets.typing import Subprotocol

from bench.cartesia import cartesia_message
from bench.fuzzing import errors_in, rss_mb
from bench.report import write
from bench.running_server import served, wait_until
from bench.simulation import simulated_tts
from megakernel_tts import TTS
from megakernel_tts.server.app import Server

_NUM_WORKERS = 24  # clients at once: three times the slots
_SETTLED_SHARE = 0.1  # of the sessions, after which memory should no longer grow
_MAX_GROWTH = 0.05
_MAX_READS = 4  # before a client disconnects
# Without the end of any session. One may last as long as the soak: a batch waits for all others.
_SESSION_TIMEOUT_S = 120.0
_RELEASE_TIMEOUT_S = 60.0

_SHORT_TEXT = "Hello there."  # whose audio is sent at once, although WebSockets are paced
_LONG_TEXT = "This is a long text, of many words. " * 20

_Message = dict[str, Any]


@dataclass
class ServerSoakReport:
    """Work done and resources left.

    Attributes:
        sessions: Sessions by protocol.
        disconnected: Sessions that the client ended early.
        refused: Replies and contexts that were refused because of the load.
        seconds: Duration.
        rss_settled_mb: Resident memory after a tenth of the sessions, in MiB, see `_used_mb`.
        rss_end_mb: Resident memory at the end.
        streams_left: Streams that the server still holds.
        sockets_left: WebSockets that it counts as open.
        slots_free: Free slots of the engine.
        slots: Slots of the engine.
        threads_left: Threads beyond those before the first session.
        descriptors_left: File descriptors beyond those before the first session.
        failures: What was wrong, with the first case of each kind.
    """

    sessions: Counter[str] = field(default_factory=Counter)
    disconnected: int = 0
    refused: int = 0
    seconds: float = 0.0
    rss_settled_mb: float = 0.0
    rss_end_mb: float = 0.0
    streams_left: int = 0
    sockets_left: int = 0
    slots_free: int = 0
    slots: int = 0
    threads_left: int = 0
    descriptors_left: int = 0
    failures: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def growth(self) -> float:
        """Growth of resident memory after the first tenth of the sessions, as a fraction."""
        return self.rss_end_mb / self.rss_settled_mb - 1

    @property
    def released(self) -> bool:
        """Whether nothing is left."""
        left = (self.streams_left, self.sockets_left, self.threads_left, self.descriptors_left)
        return not any(left) and self.slots_free == self.slots


_SPEECH = "/v1/audio/speech"
_REQUESTS: list[tuple[str, str, _Message]] = [  # path, field of the text, other fields
    (_SPEECH, "input", {"response_format": "pcm"}),
    (_SPEECH, "input", {"response_format": "mulaw", "stream_format": "sse"}),
    ("/tts/bytes", "transcript", {}),
    ("/tts/sse", "transcript", {"add_timestamps": True}),
    ("/v1/text-to-speech/ryan/with-timestamps?output_format=pcm_24000", "text", {}),
]


async def _request(host: str, port: int, rng: random.Random, report: ServerSoakReport) -> None:
    """Sends an HTTP request and reads the reply, to its end or not."""
    num_reads = _random_limit(rng)
    path, text_field, fields = rng.choice(_REQUESTS)
    fields = fields | {text_field: _SHORT_TEXT if num_reads is None else _LONG_TEXT}
    if path == _SPEECH and rng.random() < 0.2:
        path, fields = f"{path}/batch", {"items": [fields] * 2}
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    report.sessions["http"] += 1
    report.disconnected += num_reads is not None
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with suppress(ConnectionError):
            first = True
            while num_reads is None or num_reads > 0:
                part = await reader.read(1 << 16)
                if not part:
                    break
                report.refused += first and part.split(b" ", 2)[1] in (b"429", b"503")
                first, num_reads = False, None if num_reads is None else num_reads - 1
        if num_reads is not None and rng.random() < 0.5:
            writer.transport.abort()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _random_limit(rng: random.Random) -> int | None:
    """How much a client reads before it disconnects; None for all."""
    return rng.randrange(_MAX_READS) if rng.random() < 0.5 else None


@dataclass(frozen=True)
class _Protocol:
    """A kind of WebSocket.

    Attributes:
        path: Its path and query.
        messages: Makes the messages of a context, by its name, from the text.
        stop: Message that stops a context, or all.
        max_contexts: Of a connection.
        subprotocol: Its subprotocol, or None.
    """

    path: str
    messages: Callable[[str, str], list[_Message]]
    stop: _Message
    max_contexts: int = 1
    subprotocol: Subprotocol | None = None


def _cartesia(context: str, text: str) -> list[_Message]:
    fields = {"context_id": context, "add_timestamps": True}
    start = cartesia_message(text, **fields, **{"continue": True})
    return [start, cartesia_message("", **fields, **{"continue": False})]


def _elevenlabs(context: str, text: str) -> list[_Message]:
    name = {"context_id": context}
    texts = [{"text": " "} | name, {"text": f"{text} "} | name]
    return [*texts, {"flush": True} | name, {"close_context": True} | name]


def _nari(_: str, text: str) -> list[_Message]:
    start = {"type": "request.start", "voice": "ryan", "response_format": "pcm"}
    append = {"type": "input_text.append", "sequence": 0, "text": text}
    return [start, append, {"type": "input_text.end", "sequence": 1}]


_PROTOCOLS = {
    "cartesia": _Protocol("/tts/websocket", _cartesia, {"context_id": "0", "cancel": True}, 3),
    "elevenlabs": _Protocol(
        "/v1/text-to-speech/ryan/multi-stream-input?output_format=pcm_24000",
        _elevenlabs,
        {"close_socket": True},
        3,
    ),
    "nari": _Protocol(
        "/v1/audio/speech/ws",
        _nari,
        {"type": "response.cancel"},
        subprotocol=Subprotocol("nari.speech.v1"),
    ),
}


async def _converse(host: str, port: int, rng: random.Random, report: ServerSoakReport) -> None:
    """Speaks contexts over a WebSocket, and reads them to their end or not."""
    name = rng.choice([*_PROTOCOLS])
    protocol = _PROTOCOLS[name]
    num_reads = _random_limit(rng)
    text = _SHORT_TEXT if num_reads is None else _LONG_TEXT
    num_contexts = rng.randint(1, protocol.max_contexts)
    subprotocols = [protocol.subprotocol] if protocol.subprotocol else None
    report.sessions[name] += 1
    report.disconnected += num_reads is not None
    url = f"ws://{host}:{port}{protocol.path}"
    async with websockets.connect(url, subprotocols=subprotocols) as websocket:
        with suppress(websockets.ConnectionClosed):
            for context in range(num_contexts):
                for message in protocol.messages(str(context), text):
                    await websocket.send(json.dumps(message))
            num_ended = 0
            while num_ended < num_contexts and num_reads != 0:
                data = await websocket.recv()
                num_ended += _is_end(data)
                report.refused += isinstance(data, str) and '"overloaded"' in data
                num_reads = None if num_reads is None else num_reads - 1
            if num_reads is not None and rng.random() < 0.3:
                await websocket.send(json.dumps(protocol.stop))
        if num_reads is not None and rng.random() < 0.5:
            websocket.transport.abort()


def _is_end(data: str | bytes) -> bool:
    """Whether a message is the last one of its context."""
    if isinstance(data, bytes):
        return False
    message = json.loads(data)
    ends = ("done", "error", "response.done")
    return message.get("type") in ends or bool(message.get("isFinal"))


async def _run_all(authority: str, num_sessions: int, seed: int, report: ServerSoakReport) -> None:
    """Runs the sessions on a fixed number of workers."""
    host, _, port = authority.partition(":")
    indices, num_done = iter(range(num_sessions)), 0
    timeouts: set[asyncio.Timeout] = set()  # of the open sessions
    with tqdm(total=num_sessions, desc="sessions", disable=None) as progress:

        async def work() -> None:
            nonlocal num_done
            for index in indices:
                rng = random.Random(seed + index)
                run = _request if rng.random() < 0.5 else _converse
                timeout = asyncio.timeout(_SESSION_TIMEOUT_S)
                try:
                    async with timeout:
                        timeouts.add(timeout)
                        await run(host, int(port), rng, report)
                except (OSError, websockets.WebSocketException) as error:
                    session = f"seed {seed + index}, {run.__name__.lstrip('_')}"
                    report.failures.setdefault(f"session: {error!r}", session)
                timeouts.discard(timeout)
                for other in timeouts:
                    if not other.expired():
                        other.reschedule(asyncio.get_running_loop().time() + _SESSION_TIMEOUT_S)
                num_done += 1
                progress.update()
                if num_done == max(1, int(_SETTLED_SHARE * num_sessions)):
                    report.rss_settled_mb = _used_mb()

        await asyncio.gather(*(work() for _ in range(_NUM_WORKERS)))


def _used_mb() -> float:
    """Resident memory in MiB, without what the allocator could return to the system."""
    gc.collect()
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    return rss_mb()


def soak(tts: TTS, num_sessions: int, seed: int = 0) -> ServerSoakReport:
    """Runs sessions on a server and reports what they leave behind.

    Args:
        tts: Engine of the server; warm.
        num_sessions: How many sessions to run.
        seed: Determines every session.
    """
    tqdm.monitor_interval = 0  # its thread would be counted
    report, server, engine = ServerSoakReport(slots=tts.slots), Server(tts), tts._loaded.engine
    process, start_s = psutil.Process(), time.monotonic()
    with served(server) as authority, errors_in(report.failures):
        asyncio.run(_run_all(authority, 1, seed, ServerSoakReport()))  # starts threads that stay
        num_threads, num_descriptors = threading.active_count(), process.num_fds()
        asyncio.run(_run_all(authority, num_sessions, seed, report))

        def nothing_is_left() -> bool:
            report.streams_left = server.streams.num_open
            report.slots_free = engine.num_free_slots
            report.sockets_left = server.streams._num_websockets
            report.threads_left = max(0, threading.active_count() - num_threads)
            report.descriptors_left = max(0, process.num_fds() - num_descriptors)
            return report.released

        with suppress(TimeoutError):
            wait_until(nothing_is_left, _RELEASE_TIMEOUT_S)
        report.rss_end_mb = _used_mb()
    report.seconds = time.monotonic() - start_s
    return report


def main() -> int:
    """Prints the report and writes it with --json; returns 1 if a check fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=10_000, help="default: 10000")
    parser.add_argument("--seed", type=int, default=0, help="of the sessions (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    options = parser.parse_args()
    with simulated_tts(frame_seconds=0.0) as tts:
        tts.warmup()
        report = soak(tts, options.sessions, options.seed)
    figures = {
        name: round(value, 1) if isinstance(value, float) else value
        for name, value in vars(report).items()
    }
    figures |= {"growth": round(report.growth, 4)}
    write(figures, options.json, ("uvicorn", "starlette", "websockets"))
    passed = report.released and not report.failures and report.growth <= _MAX_GROWTH
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
