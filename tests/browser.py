"""Headless Chromium, controlled over its DevTools protocol."""

import asyncio
import base64
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from tests.fakes import TIMEOUT_S

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",  # and is allowed
    "--autoplay-policy=no-user-gesture-required",
    "--remote-debugging-port=0",
)


# Keys that are no characters: the code and the text of each.
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
_KEYS |= {"End": (35, ""), "ArrowLeft": (37, ""), "ArrowRight": (39, ""), "Backspace": (8, "")}
CONTROL = 2  # a modifier


class BrowserPage(Protocol):
    """A page of a browser, in which scripts run."""

    async def open(self, url: str) -> None:
        """Opens an address and waits until it is loaded."""
        ...

    async def run_on_load(self, script: str) -> None:
        """Runs a script in each page that is opened from now on."""
        ...

    async def press(self, key: str, modifiers: int = 0) -> None:
        """Presses and releases a key."""
        ...

    async def type(self, text: str) -> None:
        """Presses the keys of a text."""
        ...

    async def insert(self, text: str) -> None:
        """Adds a text at once, as if it were pasted."""
        ...

    async def run(self, script: str) -> Any:
        """Evaluates an expression; awaits its value if that is a promise."""
        ...

    async def wait_until(self, condition: str) -> None:
        """Waits until an expression, or the promise that it gives, is true."""
        ...


class Page:
    """A page of Chromium; see `BrowserPage`.

    Attributes:
        errors: Errors and warnings in the console so far, once `open` was called.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._ids = itertools.count()
        self._script = ""

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Sends a command of the protocol.

        Args:
            method: Name of the command.
            **parameters: Its parameters.

        Returns:
            The result of the command.
        """
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while (message := await self._socket.receive_json()).get("id") != number:
            await self._handle(message.get("method", ""), message.get("params", {}))
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    async def _handle(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Fetch.requestPaused":
            await self._answer(parameters["requestId"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.errors.append(str(parameters["args"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url')}")

    async def open(self, url: str) -> None:
        """See `BrowserPage`; collects errors from now on."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        self.errors.clear()
        await self.call("Page.navigate", url=url)
        while (message := await self._socket.receive_json()).get("method") != "Page.loadEventFired":
            await self._handle(message.get("method", ""), message.get("params", {}))

    async def run_on_load(self, script: str) -> None:
        """See `BrowserPage`."""
        await self.call("Page.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def press(self, key: str, modifiers: int = 0) -> None:
        """See `BrowserPage`."""
        code, text = _KEYS.get(key, (0, key))
        parameters = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": code}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        await self.call("Input.dispatchKeyEvent", **parameters, **down)
        await self.call("Input.dispatchKeyEvent", **parameters, type="keyUp")

    async def type(self, text: str) -> None:
        """See `BrowserPage`."""
        for character in text:
            await self.press(character)

    async def insert(self, text: str) -> None:
        """See `BrowserPage`."""
        await self.call("Input.insertText", text=text)

    async def replace(self, pattern: str, script: str) -> None:
        """Serves a script in place of every address that matches the pattern."""
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
        """See `BrowserPage`."""
        result = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait_until(self, condition: str) -> None:
        """See `BrowserPage`.

        The page evaluates it every 100 ms: the browser has no event for all that tests wait for.
        """
        script = f"""
            (async () => {{
              while (!(await ({condition}))) await new Promise((next) => setTimeout(next, 100));
            }})()
        """
        async with asyncio.timeout(TIMEOUT_S):
            await self.run(script)


@asynccontextmanager
async def chromium(program: str, profile: Path) -> AsyncIterator[Page]:
    """Runs a browser with one page."""
    process = await asyncio.create_subprocess_exec(
        program, *_FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        address = None
        async with asyncio.timeout(TIMEOUT_S):
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
