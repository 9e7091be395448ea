"""Events of Wyoming's protocol with changed fields, lengths and bytes, for `bench.server_fuzz`."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from tqdm import tqdm
from wyoming.event import async_read_event

from bench.fuzzing import NO_MESSAGES, FuzzConnection, FuzzReport, change, rss_mb

_NUM_CONNECTIONS = 8
_CLOSED_SHARE, _ABORTED_SHARE = 0.02, 0.02  # of the sequences, after which a connection is closed
_CHANGED_SHARE, _BROKEN_SHARE, _MISSING_SHARE = 0.1, 0.02, 0.05  # of the events
_PORTION = 10  # sequences, after which the connections are read
_TIMEOUT_S = 60.0  # of the speech of valid events

Event = tuple[str, dict[str, Any]]

_VOICE = {"name": "ryan", "language": "en"}
_TEXT: Event = ("synthesize", {"text": "One two. ", "voice": _VOICE})
_START: Event = ("synthesize-start", {"voice": _VOICE})
_CHUNK: Event = ("synthesize-chunk", {"text": "One two. "})
_STOP: Event = ("synthesize-stop", {})
_SEQUENCES: list[list[Event]] = [
    [("describe", {})],
    [("ping", {"text": "a"})],
    [("audio-start", {"rate": 16_000, "width": 2, "channels": 1})],
    [_TEXT],
    [_START, _CHUNK, _CHUNK, _TEXT, _STOP],  # as Home Assistant sends it
    [_START, ("ping", {}), _CHUNK, _STOP],
]


def random_events(rng: random.Random) -> list[bytes]:
    """Returns the bytes of a sequence of events, some of which are changed or missing."""
    events: list[bytes] = []
    for kind, data in rng.choice(_SEQUENCES):
        draw = rng.random()
        if draw < _BROKEN_SHARE:
            message = rng.choice(NO_MESSAGES)
            events.append((message.encode() if isinstance(message, str) else message) + b"\n")
        elif draw < _BROKEN_SHARE + _CHANGED_SHARE:
            header, content = _frame(kind, change(rng, data), bytes(rng.choice((0, 1, 3200))))
            header = change(rng, header) if rng.random() < 0.2 else header
            events.append(json.dumps(header).encode() + b"\n" + content)
        elif draw > _MISSING_SHARE + _BROKEN_SHARE + _CHANGED_SHARE:
            header, content = _frame(kind, data, b"")
            events.append(json.dumps(header).encode() + b"\n" + content)
    return events


def _frame(kind: str, data: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns the header of an event and what follows it."""
    content = json.dumps(data).encode()
    lengths = {"data_length": len(content), "payload_length": len(payload)}
    return {"type": kind, "version": "1.0"} | lengths, content + payload


class _Connection(FuzzConnection):
    """A TCP connection; see `FuzzConnection`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, report: FuzzReport
    ) -> None:
        self._reader, self._writer = reader, writer
        super().__init__(report)

    async def received(self) -> AsyncIterator[str]:
        """See `FuzzConnection`."""
        with suppress(OSError, EOFError):
            while (event := await async_read_event(self._reader)) is not None:
                code = event.data.get("code") if event.type == "error" else None
                yield " ".join(filter(None, (event.type, code)))

    async def send(self, content: bytes) -> None:
        """Sends bytes; does nothing once the connection is closed."""
        with suppress(OSError):
            self._writer.write(content)
            await self._writer.drain()

    def abort(self) -> None:
        """See `FuzzConnection`."""
        self._writer.transport.abort()

    async def disconnect(self) -> None:
        """See `FuzzConnection`."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


async def send_events(
    address: tuple[str, int], num_events: int, rng: random.Random, report: FuzzReport
) -> None:
    """Sends events over several connections, which are closed at random, then valid ones.

    Args:
        address: Host and port of the service.
        num_events: Number of events.
        rng: Source of randomness.
        report: Counts the events that are received.
    """
    connections: list[_Connection] = []
    settled_mb, num_sent, num_sequences = 0.0, 0, 0
    progress = tqdm(total=num_events, disable=None)
    while num_sent < num_events:
        if len(connections) < _NUM_CONNECTIONS:
            reader, writer = await asyncio.open_connection(*address)
            connections.append(_Connection(reader, writer, report))
            report.sockets += 1
        connection = rng.choice(connections)
        events = random_events(rng)[: num_events - num_sent]
        await connection.send(b"".join(events))
        settled = num_sent < num_events // 5 <= num_sent + len(events)
        settled_mb = rss_mb() if settled else settled_mb
        num_sent, num_sequences = num_sent + len(events), num_sequences + 1
        progress.update(len(events))
        draw = rng.random()
        if connection.closed or draw < _CLOSED_SHARE + _ABORTED_SHARE:
            connections.remove(connection)
            await connection.close(abort=draw < _ABORTED_SHARE)
        if num_sequences % _PORTION == 0:
            await asyncio.sleep(0.001)  # the server answers
    report.messages += num_sent
    for connection in connections:
        await connection.close()
    await _speak(address, report)
    report.rss_growth_mb += rss_mb() - settled_mb


async def _speak(address: tuple[str, int], report: FuzzReport) -> None:
    """Sends the events of live text; the speech must come, since a client waits for it."""
    reader, writer = await asyncio.open_connection(*address)
    frames = (_frame(kind, data, b"") for kind, data in (_START, _CHUNK, _STOP))
    writer.writelines(json.dumps(header).encode() + b"\n" + content for header, content in frames)
    received: list[str] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S):
            while "synthesize-stopped" not in received and (
                event := await async_read_event(reader)
            ):
                received.append(event.type)
    report.events.update(received)
    if "synthesize-stopped" not in received:
        report.failures["no speech of valid events"] = str(received)
    writer.close()
