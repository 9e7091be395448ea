"""A server with a simulated model in a process of its own.

It prints host and port, and runs until its standard input is closed.
"""

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from bench.running_server import served
from bench.simulation import simulated_tts
from megakernel_tts.server.app import Server


@asynccontextmanager
async def simulated_server(num_slots: int, frame_seconds: float) -> AsyncGenerator[str]:
    """Runs a server until the block ends; yields host and port.

    Args:
        num_slots: See `simulated_tts`.
        frame_seconds: See `simulated_tts`.
    """
    arguments = ("-m", "bench.simulated_server", str(num_slots), str(frame_seconds))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.wait()


if __name__ == "__main__":
    with simulated_tts(int(sys.argv[1]), float(sys.argv[2])) as tts:
        tts.warmup()
        with served(Server(tts)) as authority:
            gc.freeze()  # as recommended for servers
            print(authority, flush=True)
            sys.stdin.read()
