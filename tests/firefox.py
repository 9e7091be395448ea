"""Headless Firefox, controlled over Marionette, the protocol of its own tests."""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.browser import CONTROL
from tests.fakes import TIMEOUT_S
from tests.server.running import until

_PREFERENCES = {
    "marionette.port": 0,  # a free one
    "media.autoplay.default": 0,  # audio is played without a click
}
_KEYS = {"Enter": "\ue007", "Escape": "\ue00c"}  # of WebDriver, for keys that are no characters
_CONTROL_KEY = "\ue009"

# Messages about the page itself, not about the browser: those have no window.
_CONSOLE = """
    const storage = Cc["@mozilla.org/consoleAPI-storage;1"].getService(Ci.nsIConsoleAPIStorage);
    const printed = storage.getEvents()
        .filter((event) => event.innerID > 0 && ["error", "warn"].includes(event.level))
        .map((event) => event.arguments.join(" "));
    const reported = Services.console.getMessageArray()
        .filter((message) => message instanceof Ci.nsIScriptError && message.innerWindowID)
        .filter((message) => !message.sourceName.startsWith("chrome:"))
        .map((message) => message.toString());
    return [...printed, ...reported];
"""


class FirefoxPage:
    """The one page of a browser; see `BrowserPage`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._scripts: list[str] = []

    async def start(self) -> None:
        """Begins a session."""
        await self._receive()  # the browser's greeting
        await self._call("WebDriver:NewSession", capabilities={})

    async def _receive(self) -> Any:
        """The next message, which its length and a colon precede."""
        length = int((await self._reader.readuntil(b":"))[:-1])
        return json.loads(await self._reader.readexactly(length))

    async def _call(self, command: str, **parameters: object) -> Any:
        """Sends a command, and returns its result."""
        number = next(self._ids)
        message = json.dumps([0, number, command, parameters]).encode()
        self._writer.write(b"%d:%b" % (len(message), message))
        _, answered, error, result = await self._receive()
        assert answered == number and error is None, f"{command}: {error}"
        return result

    async def _evaluate(self, script: str) -> Any:
        """Runs the body of a function in the page itself, and awaits its result."""
        result = await self._call("WebDriver:ExecuteScript", script=script, args=[], sandbox=None)
        return result["value"]

    async def errors(self) -> list[str]:
        """See `BrowserPage`."""
        await self._call("Marionette:SetContext", value="chrome")
        result = await self._call("WebDriver:ExecuteScript", script=_CONSOLE, args=[])
        await self._call("Marionette:SetContext", value="content")
        return result["value"]

    async def run_on_load(self, script: str) -> None:
        """See `BrowserPage`; the page's own scripts may run before."""
        self._scripts.append(script)

    async def open(self, url: str) -> None:
        """See `BrowserPage`."""
        await self._call("WebDriver:Navigate", url=url)
        for script in self._scripts:
            await self._evaluate(script)

    async def press(self, key: str, modifiers: int = 0) -> None:
        """See `BrowserPage`."""
        keys = [_CONTROL_KEY] if modifiers == CONTROL else []
        await self._press_all([[*keys, _KEYS.get(key, key)]])

    async def type(self, text: str) -> None:
        """See `BrowserPage`."""
        await self._press_all([*text])

    async def _press_all(self, chords: Sequence[Sequence[str]]) -> None:
        """Presses and releases the keys of each chord, one chord after the other."""
        actions: list[dict[str, str]] = []
        for keys in chords:
            actions += [{"type": "keyDown", "value": key} for key in keys]
            actions += [{"type": "keyUp", "value": key} for key in reversed(keys)]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        await self._call("WebDriver:PerformActions", actions=[source])

    async def insert(self, text: str) -> None:
        """See `BrowserPage`."""
        assert await self.run(f"document.execCommand('insertText', false, {json.dumps(text)})")

    async def run(self, script: str) -> Any:
        """See `BrowserPage`."""
        return await self._evaluate(f"return ({script});")

    async def wait_until(self, condition: str) -> None:
        """See `BrowserPage`."""
        async with asyncio.timeout(TIMEOUT_S):
            while not await self.run(condition):  # noqa: ASYNC110, as in `Page`
                await asyncio.sleep(0.1)


@asynccontextmanager
async def _sound_server(folder: Path) -> AsyncIterator[str]:
    """Runs PulseAudio without a device, since Firefox plays nothing without a sound server.

    Args:
        folder: Of its files.

    Yields:
        Its address.
    """
    socket = folder / "sound"
    process = await asyncio.create_subprocess_exec(
        "pulseaudio", "-n", "--daemonize=no", "--use-pid-file=no", "--exit-idle-time=-1",
        "--load=module-null-sink",
        f"--load=module-native-protocol-unix auth-anonymous=1 socket={socket}",
        env=os.environ | {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)},
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await _wait_for(socket, process)
        yield f"unix:{socket}"
    finally:
        process.terminate()
        await process.wait()


async def _wait_for(file: Path, process: asyncio.subprocess.Process) -> None:
    """Waits until a process has made a file."""

    def made() -> bool:
        assert process.returncode is None, f"the process ended before it had made {file.name}"
        return file.exists()

    await until(made)


@asynccontextmanager
async def firefox(program: str, profile: Path) -> AsyncIterator[FirefoxPage]:
    """Runs a browser with one page; needs PulseAudio."""
    lines = [f'user_pref("{name}", {value});\n' for name, value in _PREFERENCES.items()]
    (profile / "user.js").write_text("".join(lines))
    async with _sound_server(profile) as sound_server:
        process = await asyncio.create_subprocess_exec(
            program, "--headless", "--no-remote", "--profile", str(profile),
            "--marionette", "--remote-allow-system-access",
            env=os.environ | {"PULSE_SERVER": sound_server, "HOME": str(profile)},
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port_file = profile / "MarionetteActivePort"
            await _wait_for(port_file, process)
            reader, writer = await asyncio.open_connection("127.0.0.1", port_file.read_text())
            try:
                page = FirefoxPage(reader, writer)
                await page.start()
                yield page
            finally:
                writer.close()
        finally:
            process.terminate()
            await process.wait()
