"""The client of a load, in virtual time."""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench import load_client
from bench.load_client import LoadRecord, Outcome, RandomLoad, StreamRecord, send_load
from bench.virtual_time import run_in_virtual_time
from pipecat_service.pace import loop_time_s
from tests.fakes import TIMEOUT_S

FRAME = bytes(3840)  # 80 ms
LATE_S = 0.05

Answer = Callable[[web.StreamResponse], Awaitable[object]]


async def in_time(reply: web.StreamResponse) -> None:
    await reply.write(FRAME + FRAME)


async def late(reply: web.StreamResponse) -> None:
    await reply.write(FRAME[:48])  # 1 ms
    await asyncio.sleep(LATE_S)
    await reply.write(FRAME)


async def broken_off(reply: web.StreamResponse) -> None:
    await reply.write(FRAME)
    raise ConnectionResetError


class Server:
    """Answers requests in turn, at a Unix socket: data is never on its way while time advances.

    Attributes:
        requests: Their fields.
    """

    def __init__(self, socket: Path, answers: list[Answer | web.Response]) -> None:
        self.requests: list[dict[str, Any]] = []
        self._socket = socket
        self._answers = answers

    async def _speak(self, request: web.Request) -> web.StreamResponse:
        answer = self._answers[len(self.requests) % len(self._answers)]
        self.requests.append(await request.json())
        if isinstance(answer, web.Response):
            return answer.__class__(body=answer.body, status=answer.status)
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            await answer(reply)
        except ConnectionResetError:
            assert request.transport is not None
            request.transport.abort()
        return reply

    def receive(
        self, duration_s: float, rate: float, seed: int = 0, late_s: float = 0.0
    ) -> list[StreamRecord]:
        """Receives a load that began `late_s` ago; gives the records in the order of arrival."""
        return run_in_virtual_time(self._receive(duration_s, rate, seed, late_s), TIMEOUT_S)

    async def _receive(
        self, duration_s: float, rate: float, seed: int, late_s: float
    ) -> list[StreamRecord]:
        app = web.Application()
        app.router.add_post("/v1/audio/speech", self._speak)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, self._socket).start()
        try:
            url, start_s = "http://server/v1/audio/speech", loop_time_s() - late_s
            record = await send_load(RandomLoad(url, {"a": 1}, rate, start_s, duration_s, seed))
        finally:
            await runner.cleanup()
        assert LoadRecord.parse(json.dumps(asdict(record))) == record
        return sorted(record.streams, key=lambda each: each.arrival_s)


MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeServer:
    """Makes servers at the socket to which the client connects."""
    socket = tmp_path / "socket"
    clock = SimpleNamespace(monotonic=loop_time_s, process_time=time.process_time)
    monkeypatch.setattr(load_client, "time", clock)
    monkeypatch.setattr(aiohttp, "TCPConnector", partial(aiohttp.UnixConnector, str(socket)))
    return partial(Server, socket)


def refusal(status: int, error: Mapping[str, object] | str) -> web.Response:
    return web.Response(status=status, body=json.dumps({"error": error}).encode())


@pytest.mark.parametrize(
    ("answer", "outcome", "audio_s", "late_chunks"),
    [
        (in_time, Outcome.COMPLETE, 0.16, 0),
        (late, Outcome.COMPLETE, 0.081, 1),
        (broken_off, Outcome.FAILED, 0.08, 0),
        (refusal(429, {"code": "overloaded"}), Outcome.REFUSED, 0, 0),
        (refusal(503, {"code": "engine_closed"}), Outcome.FAILED, 0, 0),
        (refusal(502, "Bad gateway"), Outcome.FAILED, 0, 0),
        (web.Response(status=502, body=b"no JSON"), Outcome.FAILED, 0, 0),
    ],
)
def test_a_request_is_recorded(
    make_server: MakeServer,
    answer: Answer | web.Response,
    outcome: Outcome,
    audio_s: float,
    late_chunks: int,
) -> None:
    records = make_server([answer]).receive(0.05, 60.0)
    assert records
    for record in records:
        assert record.outcome is outcome
        assert record.audio_s == pytest.approx(audio_s)
        assert record.first_s == (pytest.approx(0) if audio_s else None)
        assert record.gaps_s == pytest.approx(late_chunks * [LATE_S - 0.001])
        assert record.delay_s == pytest.approx(0)
        assert record.end_s == pytest.approx(late_chunks * LATE_S)


def test_a_request_that_is_sent_late_is_timed_from_its_sending(make_server: MakeServer) -> None:
    """The client's process was not scheduled: that is not the server's time."""
    late_s = 100.0
    records = make_server([late]).receive(0.05, 60.0, late_s=late_s)
    assert records
    for record in records:
        assert record.sent_s == record.arrival_s + record.delay_s == pytest.approx(late_s)
        assert record.first_s == pytest.approx(0)
        assert record.ended_s == record.sent_s + record.end_s == pytest.approx(late_s + LATE_S)


def test_a_connection_is_not_the_servers_time(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is timed from its body, as by Nari's benchmark."""
    server, make_connector, connect_s = make_server([late]), aiohttp.TCPConnector, 0.2

    def make_slow_connector(**options: Any) -> aiohttp.BaseConnector:
        connector = make_connector(**options)
        connect = connector.connect

        async def connect_slowly(*arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(connect_s)
            return await connect(*arguments, **options)

        monkeypatch.setattr(connector, "connect", connect_slowly)
        return connector

    monkeypatch.setattr(aiohttp, "TCPConnector", make_slow_connector)
    records = server.receive(0.05, 60.0)
    assert records
    for record in records:
        assert record.delay_s == pytest.approx(connect_s)
        assert record.first_s == pytest.approx(0)
        assert record.end_s == pytest.approx(LATE_S)


def test_arrivals_are_random_and_the_same_in_each_run(make_server: MakeServer) -> None:
    server = make_server([in_time])
    one, other = (server.receive(0.4, 100.0, seed=3) for _ in range(2))
    arrivals_s = [record.arrival_s for record in one]
    assert arrivals_s == [record.arrival_s for record in other]
    assert len(arrivals_s) == len(server.requests) / 2
    assert 15 < len(arrivals_s) < 80 and 0 < arrivals_s[0] and arrivals_s[-1] < 0.4
    intervals = {round(after - before, 6) for before, after in itertools.pairwise(arrivals_s)}
    assert len(intervals) > len(arrivals_s) / 2
    seeds = [request["seed"] for request in server.requests[: len(one)]]
    assert len({*seeds}) == len(seeds) and {*seeds} == {
        request["seed"] for request in server.requests[len(one) :]
    }
    assert all(request["a"] == 1 for request in server.requests)
