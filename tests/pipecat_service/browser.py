"""Chromium without a window, driven over its own protocol."""

import asyncio
import base64
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.pipecat_service.bot import PATIENCE

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",  # and is allowed
    "--autoplay-policy=no-user-gesture-required",
    "--remote-debugging-port=0",
)


class Page:
    """A page that scripts are run in."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count()
        self._script = ""

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """One command of the protocol; gives its result."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while (message := await self._socket.receive_json()).get("id") != number:
            if message.get("method") == "Fetch.requestPaused":
                await self._answer(message["params"]["requestId"])
        return message["result"]

    async def replace(self, pattern: str, script: str) -> None:
        """Gives the page a script of one's own for every address that fits the pattern."""
        self._script = script
        await self.call("Fetch.enable", patterns=[{"urlPattern": pattern}])

    async def _answer(self, request: str) -> None:
        headers = [{"name": "Content-Type", "value": "text/javascript"}]
        body = base64.b64encode(self._script.encode()).decode()
        answer = {"requestId": request, "responseCode": 200, "responseHeaders": headers}
        await self._socket.send_json(
            {
                "id": next(self._ids),
                "method": "Fetch.fulfillRequest",
                "params": answer | {"body": body},
            }
        )

    async def run(self, script: str) -> Any:
        """Runs an expression; gives its value, that of a promise once it is there."""
        result = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        """Runs an expression until its value is true; gives it."""
        async with asyncio.timeout(PATIENCE):
            while not (value := await self.run(script)):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        return value


@asynccontextmanager
async def chromium(program: str, profile: Path) -> AsyncIterator[Page]:
    """A browser with one page."""
    process = await asyncio.create_subprocess_exec(
        program, *_FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        address = None
        async with asyncio.timeout(PATIENCE):
            while not (address := re.search(rb"ws://([^/]+)/", await process.stderr.readline())):
                pass
        async with aiohttp.ClientSession(f"http://{address[1].decode()}") as session:
            targets = await (await session.get("/json")).json()
            (page,) = [target for target in targets if target["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        await process.communicate()
