"""WebSockets that speak at the pace of playback, in a process of their own.

It prints a line once all of them speak, and runs until its standard input is closed.
"""

import asyncio
import base64
import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import websockets

from bench.cartesia import cartesia_message

INTERVAL_S = 0.02  # between two streams that begin
_BYTES_PER_S = 48_000  # of 16-bit samples at 24 kHz


@asynccontextmanager
async def other_sockets(authority: str, number: int, text: str) -> AsyncGenerator[None]:
    """Speaks over WebSockets until the block ends; it begins when all of them have.

    Args:
        authority: Host and port of the server.
        number: Of WebSockets.
        text: Is spoken again and again.

    Raises:
        RuntimeError: The server has refused or ended the speech; if the block has begun, after it.
    """
    pipe = asyncio.subprocess.PIPE
    arguments = ("-m", "bench.other_sockets", authority, str(number), text)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        speaking = bool(await process.stdout.readline())
        if speaking:
            yield
    finally:
        process.stdin.close()
        status = await process.wait()
    if status or not speaking:
        raise RuntimeError(f"Another stream has failed (status {status}); its error is above.")


async def _speak(authority: str, text: str, begun: asyncio.Event) -> None:
    async with websockets.connect(f"ws://{authority}/tts/websocket") as websocket:
        while True:
            await websocket.send(json.dumps(cartesia_message(text, context_id="a")))
            played_s = 0.0  # time at which the audio so far has been played
            while (event := json.loads(await websocket.recv()))["type"] != "done":
                if event["type"] == "error":
                    raise RuntimeError(f"The server has refused speech: {event}")
                begun.set()
                played_s = max(played_s, time.monotonic())
                played_s += len(base64.b64decode(event["data"])) / _BYTES_PER_S
            await asyncio.sleep(played_s - time.monotonic())


async def _speak_all(authority: str, number: int, text: str) -> None:
    async with asyncio.TaskGroup() as group:  # a stream that fails ends the others
        begun = [asyncio.Event() for _ in range(number)]
        tasks: list[asyncio.Task[None]] = []
        for each in begun:
            tasks.append(group.create_task(_speak(authority, text, each)))
            await asyncio.sleep(INTERVAL_S)
        for each in begun:
            await each.wait()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    authority, number, text = sys.argv[1:]
    asyncio.run(_speak_all(authority, int(number), text))
