import asyncio
from typing import Any

import httpx
import pytest
import websockets

from megakernel_tts import TTS
from megakernel_tts.server.keys import ApiKey
from megakernel_tts.server.settings import ServerSettings
from tests.server.running import TEXT, RunningServer, connected, running_server

KEY = "secret-key-2"
WAYS: list[tuple[dict[str, str], str]] = [
    ({"Authorization": f"Bearer {KEY}"}, ""),
    ({"X-API-Key": KEY}, ""),
    ({"xi-api-key": KEY}, ""),
    ({"X-Vapi-Secret": KEY}, ""),
    ({"Authorization": f"Token {KEY}"}, ""),
    ({}, f"?api_key={KEY}"),
    ({}, f"?cartesia_version=2025-04-16&access_token={KEY}"),
]
WRONG: list[tuple[dict[str, str], str]] = [
    ({}, ""),
    ({"Authorization": "Bearer secret"}, ""),
    ({"Authorization": KEY}, ""),
    ({"X-API-Key": KEY + "x"}, ""),
    ({}, "?api_key="),
    ({}, f"?key={KEY}"),
]


@pytest.fixture(scope="module")
def locked(engine: TTS) -> Any:
    keys = (ApiKey(name="other", key="secret-key-1"), ApiKey(name="bot", key=KEY))
    with running_server(engine, ServerSettings(api_keys=keys)) as server:
        yield server


async def handshake(server: RunningServer, headers: dict[str, str], query: str) -> None:
    url = server.socket_url + query
    async with websockets.connect(url, additional_headers=headers):
        pass


@pytest.mark.parametrize(("headers", "query"), WAYS)
def test_every_way_to_send_a_key_is_accepted(
    locked: RunningServer, headers: dict[str, str], query: str
) -> None:
    assert httpx.get(f"{locked.url}/v1/models{query}", headers=headers).status_code == 200
    asyncio.run(handshake(locked, headers, query))


@pytest.mark.parametrize(("headers", "query"), WRONG)
def test_requests_without_a_valid_key_are_401(
    locked: RunningServer, headers: dict[str, str], query: str
) -> None:
    for path in ("/v1/models", "/metrics", "/v1/nothing"):
        reply = httpx.get(f"{locked.url}{path}{query}", headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(websockets.InvalidStatus) as caught:
        asyncio.run(handshake(locked, headers, query))
    assert caught.value.response.status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_needs_no_key(locked: RunningServer, path: str) -> None:
    assert httpx.get(locked.url + path).status_code == 200


def test_pages_of_other_sites_are_refused(server: RunningServer) -> None:
    headers = {"Origin": "https://other.example"}
    url = f"{server.url}/v1/audio/speech"
    assert httpx.post(url, json={"input": TEXT}, headers=headers).status_code == 403
    with pytest.raises(websockets.InvalidStatus):
        asyncio.run(handshake(server, headers, ""))
    asyncio.run(handshake(server, {"Origin": server.url}, ""))


def test_replies_allow_no_other_origin(server: RunningServer) -> None:
    reply = httpx.options(f"{server.url}/v1/audio/speech", headers={"Origin": server.url})
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_compression_is_not_negotiated(server: RunningServer) -> None:
    async def extensions() -> str | None:
        async with connected(server, compression="deflate") as client:
            assert client.websocket.response is not None
            return client.websocket.response.headers.get("Sec-WebSocket-Extensions")

    assert asyncio.run(extensions()) is None


@pytest.mark.parametrize(
    "message", ["x" * (2 << 20), [*["x" * (1 << 19)] * 2, "x"]], ids=["one frame", "fragments"]
)
def test_a_large_message_closes_the_socket(server: RunningServer, message: str | list[str]) -> None:
    async def send() -> None:
        async with connected(server) as client:
            await client.websocket.send(message)
            await client.websocket.recv()

    with pytest.raises(websockets.ConnectionClosed) as caught:
        asyncio.run(send())
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009
