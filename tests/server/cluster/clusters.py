"""Clusters of engine processes, and what their sessions say."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

import numpy as np
import psutil

from bench.simulated_engine import SIMULATED_ENGINE
from megakernel_tts import AudioChunk, ChunkPolicy, Finish, LivePolicy, Sampling, Voice
from megakernel_tts.server.cluster.client import EngineClient
from megakernel_tts.server.cluster.engine_cluster import EngineCluster
from megakernel_tts.server.cluster.placement import Placement
from megakernel_tts.server.engine import SpeechEngine, SpeechSession
from tests.fakes import TIMEOUT_S

TEXT = "Hello there, my friend. "
LONG_TEXT = TEXT * 45  # more characters than are tokenised on an event loop's thread
FRAME_S = "0.001"  # the simulated model's name is the time of a frame
CHUNKS = LivePolicy().chunks
SAMPLING = Sampling(seed=1)
TWO_PLACES = [Placement(f"cpu:{i}", "cpu", {"OMP_NUM_THREADS": "1"}) for i in range(2)]


@asynccontextmanager
async def simulated_cluster(slots: int = 4) -> AsyncGenerator[EngineCluster]:
    """Two simulated engines, both of which are warm."""
    async with EngineCluster.start(FRAME_S, TWO_PLACES, slots, command=SIMULATED_ENGINE) as cluster:
        await until(lambda: cluster.slots == 2 * slots)
        yield cluster


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition on the state of the event loop, which has no event."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def open_session(
    engine: SpeechEngine,
    text: str | None,
    voice: str | Voice | None = None,
    *,
    sampling: Sampling = SAMPLING,
    chunks: ChunkPolicy = CHUNKS,
    speed: float = 1.0,
    pronunciations: Mapping[str, str] | None = None,
    priority: int = 0,
) -> SpeechSession:
    """Opens a session with the defaults of the server."""
    return await engine.aopen(
        voice,
        "auto",
        None,
        layout="auto",
        sampling=sampling,
        chunks=chunks,
        speed=speed,
        pronunciations=pronunciations or {},
        text=text,
        priority=priority,
    )


async def read_all(session: SpeechSession) -> tuple[list[AudioChunk], Finish]:
    """The chunks of a session and its finish."""
    chunks: list[AudioChunk] = []
    async with asyncio.timeout(TIMEOUT_S), aclosing(aiter(session)) as events:
        async for event in events:
            if isinstance(event, Finish):
                return chunks, event
            chunks.append(event)
    raise AssertionError("no finish")


async def read_chunks(session: SpeechSession, number: int) -> list[AudioChunk]:
    """The next chunks of a session."""
    chunks: list[AudioChunk] = []
    async with asyncio.timeout(TIMEOUT_S), aclosing(aiter(session)) as events:
        async for event in events:
            assert isinstance(event, AudioChunk)
            chunks.append(event)
            if len(chunks) == number:
                break
    return chunks


def assert_equal_speech(
    ours: tuple[list[AudioChunk], Finish], theirs: tuple[list[AudioChunk], Finish]
) -> None:
    """Compares codes, samples, words and finish, bit for bit; the sizes of chunks may differ."""
    assert ours[1] == theirs[1]
    for name in ("codes", "pcm"):
        one, two = (
            np.concatenate([getattr(chunk, name) for chunk in chunks])
            for chunks, _ in (ours, theirs)
        )
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    words = [[word for chunk in chunks for word in chunk.words] for chunks, _ in (ours, theirs)]
    assert words[0] == words[1]
    frame = 0
    for chunk in ours[0]:
        assert (chunk.frame, chunk.sample_rate) == (frame, theirs[0][0].sample_rate)
        frame += len(chunk.codes)


def child_processes() -> set[psutil.Process]:
    """The processes that this one has started, zombies included."""
    return set(psutil.Process().children())


def kill(cluster: EngineCluster, index: int, number: int = signal.SIGKILL) -> EngineClient:
    """Sends a signal to an engine process, by default as `kill -9` does; gives its client."""
    client = cluster._supervisors[index].client
    assert client is not None
    os.kill(client._process.pid, number)
    return client
