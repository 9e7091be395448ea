"""A server in a process of its own, with a model on a GPU or over a simulated device.

It prints host and port, and runs until its standard input is closed.
"""

import asyncio
import gc
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.running_server import served
from bench.timed_device import H200_TIMES, timed_tts
from megakernel_tts import TTS
from megakernel_tts.server.app import Server


@dataclass(frozen=True)
class EngineSource:
    """What an engine is made of, in this process or in that of a server.

    Attributes:
        slots: Streams at once.
        folder: A model for the GPU; empty for an engine over a simulated device.
    """

    slots: int
    folder: str = ""

    def load(self) -> TTS:
        """Makes the engine."""
        if self.folder:
            return TTS.load(self.folder, "cuda", slots=self.slots)
        return timed_tts(H200_TIMES, self.slots)[0]


@asynccontextmanager
async def server_process(source: EngineSource, cores: Sequence[int] = ()) -> AsyncGenerator[str]:
    """Runs a server until the block ends; yields host and port.

    Args:
        source: Of its engine.
        cores: On which it runs; empty for any.
    """
    arguments = (str(source.slots), source.folder)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.server_process", *arguments, stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None and process.stdout is not None
    if cores:
        os.sched_setaffinity(process.pid, cores)
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.wait()


if __name__ == "__main__":
    slots, folder = sys.argv[1:]
    with EngineSource(int(slots), folder).load() as tts:
        tts.warmup()
        with served(Server(tts)) as authority:
            gc.freeze()  # as recommended for servers
            print(authority, flush=True)
            sys.stdin.read()
