"""Limits of keys and priorities, as clients see them."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest

from bench.simulation import simulated_tts
from megakernel_tts import TTS
from megakernel_tts.server.accounts import Account
from megakernel_tts.server.keys import ApiKey
from megakernel_tts.server.settings import ServerSettings
from tests.fakes import TIMEOUT_S
from tests.rig import ManualClock
from tests.server.running import TEXT, Client, RunningServer, connected, running_server, until

LONG_TEXT = TEXT * 500


@pytest.fixture(scope="module")
def one_slot() -> Iterator[TTS]:
    with simulated_tts(num_slots=1, frame_seconds=0.001) as tts:
        tts.warmup()
        yield tts


async def post(server: RunningServer, key: str = "", **fields: Any) -> httpx.Response:
    body = {"input": TEXT, "response_format": "pcm"} | fields
    headers = {"Authorization": f"Bearer {key or None}"}
    async with httpx.AsyncClient() as client:
        return await client.post(f"{server.url}/v1/audio/speech", json=body, headers=headers)


def statuses(responses: Sequence[httpx.Response]) -> list[int]:
    return [response.status_code for response in responses]


@asynccontextmanager
async def speaking(server: RunningServer) -> AsyncIterator[Client]:
    """A live context that speaks until the block ends."""
    async with connected(server) as client:
        await client.send("speaking", LONG_TEXT)
        await client.receive()
        yield client


@contextmanager
def limited(engine: TTS, **limits: Any) -> Iterator[RunningServer]:
    """A server with a key `limited` that has limits, and a key `free` without.

    The clock of their accounts stands still.
    """
    keys = (ApiKey(name="bot", key="limited", **limits), ApiKey(name="admin", key="free"))
    account = partial(Account, clock=ManualClock())
    with (
        patch("megakernel_tts.server.accounts.Account", account),
        running_server(engine, ServerSettings(api_keys=keys)) as server,
    ):
        yield server


def check_refusal(response: httpx.Response, wait_s: int) -> None:
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) == wait_s


def test_requests_and_characters_of_a_key_are_limited(engine: TTS) -> None:
    async def act(server: RunningServer) -> None:
        for _ in range(2):
            assert (await post(server, "limited")).status_code == 200
        check_refusal(await post(server, "limited"), 30)
        assert (await post(server, "free")).status_code == 200

    with limited(engine, requests_per_minute=2) as server:
        asyncio.run(act(server))
        assert server.metric('requests_total{key="bot"}') == 2
        assert server.metric('characters_total{key="bot"}') == 2 * len(TEXT)
        assert server.metric('rejected_requests_total{reason="limit",key="bot"}') == 1
        text = server.server.streams.metrics.text()
        assert 'key="limited"' not in text and 'key="free"' not in text
    with limited(engine, characters_per_minute=2 * len(TEXT)) as server:
        asyncio.run(act(server))


def test_streams_of_a_key_are_limited_and_freed_by_their_end(engine: TTS) -> None:
    async def act(server: RunningServer) -> None:
        headers = {"X-API-Key": "limited"}
        async with connected(server, additional_headers=headers) as client:
            await client.send("a", LONG_TEXT)
            await client.receive()
            check_refusal(await post(server, "limited"), 1)
            await client.send("b", TEXT)
            error = (await client.until_done("b"))[-1]
            assert (error["status_code"], error["error_code"]) == (429, "rate_limit_exceeded")
            assert (await post(server, "free")).status_code == 200
            await client.cancel("a")
            await until(lambda: server.num_streams == 0)
            assert (await post(server, "limited")).status_code == 200

    with limited(engine, streams=1) as server:
        asyncio.run(act(server))


def test_live_text_counts_as_it_arrives(engine: TTS) -> None:
    async def act(server: RunningServer) -> None:
        async with connected(server, additional_headers={"X-API-Key": "limited"}) as client:
            for _ in range(2):
                await client.send("a", TEXT, **{"continue": True})
            await client.send("a", "", **{"continue": False})
            assert (await client.until_done("a"))[-1]["type"] == "done"
            await client.send("b", TEXT)
            assert (await client.until_done("b"))[-1]["error_code"] == "rate_limit_exceeded"

    with limited(engine, characters_per_minute=len(TEXT)) as server:
        asyncio.run(act(server))
        assert server.metric('characters_total{key="bot"}') == 2 * len(TEXT)


def test_requests_that_fail_to_open_count_as_no_stream(engine: TTS) -> None:
    async def act(server: RunningServer) -> None:
        for _ in range(3):
            assert (await post(server, "limited", input=" ")).status_code == 400
        assert (await post(server, "limited")).status_code == 200

    with limited(engine, streams=1) as server:
        asyncio.run(act(server))


def test_waiting_requests_are_served_by_priority(one_slot: TTS) -> None:
    async def act(server: RunningServer) -> list[str]:
        order: list[str] = []

        async def speak(name: str, **fields: Any) -> None:
            assert (await post(server, **fields)).status_code == 200
            order.append(name)

        async with speaking(server) as client, asyncio.TaskGroup() as group:
            requests = [("batch", "batch"), ("default", None), ("live", "live")]
            for count, (name, priority) in enumerate(requests, 2):
                group.create_task(speak(name, priority=priority))
                await until(lambda count=count: server.num_streams == count)
            await client.cancel("speaking")
        return order

    with running_server(one_slot, ServerSettings(queue_timeout_s=TIMEOUT_S)) as server:
        assert asyncio.run(act(server)) == ["live", "default", "batch"]


def test_a_live_turn_interrupts_a_batch_which_loses_no_audio(one_slot: TTS) -> None:
    async def act(server: RunningServer) -> None:
        text = TEXT * 40
        batch = asyncio.create_task(post(server, input=text, priority="batch"))
        await until(lambda: server.metric("num_requests_running") == 1)
        async with connected(server) as client:
            await client.send("a", TEXT)
            assert (await client.until_done("a"))[-1]["type"] == "done"
        assert not batch.done()
        pcm = np.frombuffer((await batch).content, "<i2")
        assert np.array_equal(pcm, server.speech(text))

    with running_server(one_slot) as server:
        asyncio.run(act(server))


def test_a_full_queue_refuses_requests_of_low_priority_first(one_slot: TTS) -> None:
    async def act(server: RunningServer) -> None:
        def start(priority: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(post(server, priority=priority))

        async def refused(task: asyncio.Task[httpx.Response]) -> None:
            response = await asyncio.wait_for(task, TIMEOUT_S)
            assert response.status_code == 429 and response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "overloaded"
            await until(lambda: server.num_streams == 3)

        async with speaking(server) as client:
            first, second = start("batch"), start("batch")
            await until(lambda: server.num_streams == 3)
            await refused(start("batch"))  # nothing is below it
            prefetch = start("prefetch")
            waiting = {first, second}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await refused(done.pop())
            live = start("live")
            await refused(first if second.done() else second)
            second_live = start("live")
            await refused(prefetch)
            await refused(start("live"))
            await client.cancel("speaking")
            assert statuses(await asyncio.gather(live, second_live)) == [200, 200]

    settings = ServerSettings(max_queue=2, queue_timeout_s=TIMEOUT_S)
    with running_server(one_slot, settings) as server:
        asyncio.run(act(server))
        assert server.metric('rejected_requests_total{reason="overload"}') == 5


def test_a_waiting_request_is_refused_at_its_deadline(
    one_slot: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(server: RunningServer) -> None:
        async with speaking(server):
            hasty = ServerSettings(queue_timeout_s=0.05)
            monkeypatch.setattr(server.server.streams, "settings", hasty)
            responses = await asyncio.gather(*(post(server, priority="batch") for _ in range(2)))
            assert statuses(responses) == [503, 503]
            assert all(response.headers["retry-after"] == "1" for response in responses)

    with running_server(one_slot) as server:
        asyncio.run(act(server))
        assert server.metric('rejected_requests_total{reason="timeout"}') == 2


@pytest.mark.parametrize("value", ["urgent", 3, ["live"]])
def test_unknown_priorities_are_refused(server: RunningServer, value: object) -> None:
    response = asyncio.run(post(server, priority=value))
    assert response.status_code == 400 and response.json()["error"]["param"] == "priority"
