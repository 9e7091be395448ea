"""A server in a process of its own, with a simulated model or one on a GPU.

It prints host and port, and runs until its standard input is closed.
"""

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.running_server import served
from bench.simulation import simulated_tts
from megakernel_tts import TTS
from megakernel_tts.server.app import Server


@dataclass(frozen=True)
class EngineSource:
    """What an engine is made of, in this process or in that of a server.

    Attributes:
        slots: Streams at once.
        frame_seconds: Of a simulated model; see `simulated_tts`.
        folder: A model for the GPU, which replaces the simulated one; empty for none.
    """

    slots: int
    frame_seconds: float
    folder: str = ""

    def load(self) -> TTS:
        """Makes the engine."""
        if self.folder:
            return TTS.load(self.folder, "cuda", slots=self.slots)
        return simulated_tts(self.slots, self.frame_seconds)


@asynccontextmanager
async def server_process(source: EngineSource) -> AsyncGenerator[str]:
    """Runs a server until the block ends; yields host and port.

    Args:
        source: Of its engine.
    """
    arguments = (str(source.slots), str(source.frame_seconds), source.folder)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.server_process", *arguments, stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.wait()


if __name__ == "__main__":
    slots, frame_seconds, folder = sys.argv[1:]
    with EngineSource(int(slots), float(frame_seconds), folder).load() as tts:
        tts.warmup()
        with served(Server(tts)) as authority:
            gc.freeze()  # as recommended for servers
            print(authority, flush=True)
            sys.stdin.read()
