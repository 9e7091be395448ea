import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
from aiohttp import web

from bench.load_client import LoadRecord, Outcome, RandomLoad, StreamRecord, send_load

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
    """Answers requests in turn.

    Attributes:
        requests: Their fields.
    """

    def __init__(self, answers: list[Answer | web.Response]) -> None:
        self.requests: list[dict[str, Any]] = []
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

    async def receive(
        self, duration_s: float, rate: float, seed: int = 0, late_s: float = 0.0
    ) -> list[StreamRecord]:
        """Receives a load that began `late_s` ago; gives the records in the order of arrival."""
        app = web.Application()
        app.router.add_post("/v1/audio/speech", self._speak)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = runner.addresses[0][:2]
            url = f"http://{host}:{port}/v1/audio/speech"
            start_s = time.monotonic() - late_s
            record = await send_load(RandomLoad(url, {"a": 1}, rate, start_s, duration_s, seed))
        finally:
            await runner.cleanup()
        assert LoadRecord.parse(json.dumps(asdict(record))) == record
        return sorted(record.streams, key=lambda each: each.arrival_s)


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
    answer: Answer | web.Response, outcome: Outcome, audio_s: float, late_chunks: int
) -> None:
    records = asyncio.run(Server([answer]).receive(0.05, 60.0))
    assert records
    for record in records:
        assert record.outcome is outcome
        assert record.audio_s == pytest.approx(audio_s)
        assert (record.first_s is None) is (audio_s == 0)
        assert len(record.gaps_s) == late_chunks
        assert all(gap_s > LATE_S / 2 for gap_s in record.gaps_s)
        assert record.delay_s >= 0
        assert 0 < (record.first_s or 0.0) <= record.end_s or not audio_s


def test_a_request_that_is_sent_late_is_timed_from_its_sending() -> None:
    """The client's process was not scheduled: that is not the server's time."""
    late_s = 100.0
    records = asyncio.run(Server([in_time]).receive(0.05, 60.0, late_s=late_s))
    assert records
    for record in records:
        assert record.delay_s > late_s - 0.05
        assert record.first_s is not None and 0 < record.first_s <= record.end_s < late_s / 2
        assert record.sent_s == record.arrival_s + record.delay_s
        assert record.ended_s == record.sent_s + record.end_s


def test_arrivals_are_random_and_the_same_in_each_run() -> None:
    server = Server([in_time])
    one, other = (asyncio.run(server.receive(0.4, 100.0, seed=3)) for _ in range(2))
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
