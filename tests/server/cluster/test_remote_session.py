import asyncio
import os

import numpy as np

from megakernel_tts import AudioChunk
from megakernel_tts.server.cluster.audio_ring import (
    RingReader,
    RingWriter,
    create_memory,
    map_rings,
)
from megakernel_tts.server.cluster.messages import Chunk, Message, Release
from megakernel_tts.server.cluster.remote_session import RemoteSession


def test_a_chunk_is_passed_on_before_its_memory_is_released() -> None:
    async def main() -> None:
        memory, sent = create_memory(1), list[Message]()
        (ring,) = map_rings(memory)
        os.close(memory)
        writer = RingWriter(ring)
        session = RemoteSession(3, RingReader(ring), sent.append, lambda: None)
        pcm = np.arange(10, dtype=np.int16)
        writer.write(AudioChunk(pcm, 24_000, np.zeros((1, 16), np.int64), 0))
        session.receive(Chunk(3, 1, (), 0.0))
        chunk = await anext(aiter(session))
        assert isinstance(chunk, AudioChunk) and np.array_equal(chunk.pcm, pcm)
        assert not sent
        await asyncio.sleep(0)
        assert sent == [Release(3, writer.position)]

    asyncio.run(main())
