"""Names under which clients reach a server: the guard against DNS rebinding."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
import websockets

from megakernel_tts import TTS
from megakernel_tts.server.settings import ServerSettings
from tests.server.running import LOCKED, RunningServer, running_server

ALLOWED = [
    "127.0.0.1",
    "127.0.0.1:8000",
    "192.168.0.7:8000",
    "[::1]:8000",
    "localhost",
    "LocalHost:8000",
    "page.localhost",
    "speech.example",
    "Speech.Example.:443",
]
REFUSED = [
    "evil.example:8000",
    "localhost.evil.example",
    "notlocalhost",
    "127.0.0.1.evil.example",
    "other.speech.example",
    "127.1",
    "[::1",
    ":8000",
]


@pytest.fixture(scope="module")
def guarded(engine: TTS) -> Iterator[RunningServer]:
    settings = ServerSettings(allowed_hosts=["127.0.0.1", "speech.example"])
    with running_server(engine, settings) as server:
        yield server


def get(
    server: RunningServer, host: str, path: str = "/v1/models", key: str = ""
) -> httpx.Response:
    """Requests as a page under this host does."""
    headers = {"Host": host, "Origin": f"http://{host}", "X-API-Key": key}
    return httpx.get(server.url + path, headers=headers)


async def handshake(server: RunningServer, host: str, key: str = "") -> None:
    """Opens a WebSocket as a page under this host does."""
    address, _, port = server.authority.partition(":")
    headers = {"Origin": f"http://{host}", "X-API-Key": key}
    url = f"ws://{host}/tts/websocket"
    async with websockets.connect(url, host=address, port=int(port), additional_headers=headers):
        pass


@pytest.mark.parametrize("host", ALLOWED)
def test_addresses_and_names_of_the_server_are_allowed(guarded: RunningServer, host: str) -> None:
    assert get(guarded, host).status_code == 200


@pytest.mark.parametrize("host", REFUSED)
@pytest.mark.parametrize("path", ["/v1/models", "/", "/health"])
def test_other_names_are_refused(guarded: RunningServer, host: str, path: str) -> None:
    reply = get(guarded, host, path)
    assert reply.status_code == 403
    error = reply.json()["error"]
    assert error["code"] == "invalid_host" and "--allowed-host" in error["message"]


def test_websockets_need_an_allowed_name(guarded: RunningServer) -> None:
    for host in ("localhost:8000", "speech.example"):
        asyncio.run(handshake(guarded, host))
    with pytest.raises(websockets.InvalidStatus) as caught:
        asyncio.run(handshake(guarded, "evil.example:8000"))
    assert caught.value.response.status_code == 403
    assert b"--allowed-host evil.example" in (caught.value.response.body or b"")


def test_a_client_that_names_no_host_is_no_browser(guarded: RunningServer) -> None:
    reply = httpx.get(f"{guarded.url}/health", headers={"Host": ""})
    assert reply.status_code == 200


def test_a_server_with_keys_may_have_any_name(engine: TTS) -> None:
    """As behind a proxy that passes the header on."""
    with running_server(engine, LOCKED) as server:
        assert get(server, "speech.example", key="secret").status_code == 200
        asyncio.run(handshake(server, "speech.example", key="secret"))
        assert get(server, "speech.example").status_code == 401
