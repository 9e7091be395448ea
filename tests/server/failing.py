"""Steps of an engine that fail, and the clients of their streams."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from megakernel_tts.errors import DeviceError
from tests.server.running import TEXT, RunningServer

REASON = "The kernel timed out."


def failing(step: Callable[..., Any], num_streams: int, due: Callable[[], bool]) -> Any:
    """A `Backend.step` that fails as a launch for `num_streams` streams does, while that is due."""

    def step_or_fail(slots: Sequence[int], *arguments: Any) -> Any:
        if len(slots) == num_streams and due():
            raise DeviceError(REASON)
        return step(slots, *arguments)

    return step_or_fail


async def read_until_failure(
    server: RunningServer, num_streams: int, on_speaking: Callable[[], object]
) -> None:
    """Reads raw replies until all of them fail, which each client notices.

    Args:
        server: The server.
        num_streams: Number of replies.
        on_speaking: Called when each client has audio; has the engine fail.
    """
    num_waiting = num_streams

    async def read(client: httpx.AsyncClient) -> None:
        nonlocal num_waiting
        body = {"input": TEXT * 500, "response_format": "pcm"}
        async with client.stream("POST", "/v1/audio/speech", json=body) as reply:
            parts = reply.aiter_raw()
            await anext(parts)
            num_waiting -= 1
            if not num_waiting:
                on_speaking()
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                async for _ in parts:
                    pass

    async with httpx.AsyncClient(base_url=server.url) as client:
        await asyncio.gather(*(read(client) for _ in range(num_streams)))
