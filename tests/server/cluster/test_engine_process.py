"""An `EngineProcess` in this process, with engines that tests make."""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import pytest

from megakernel_tts import AudioChunk, ChunkPolicy, Finish, ModelInfo, Sampling, Voice
from megakernel_tts.server.cluster.audio_ring import RING_BYTES, create_memory, map_rings
from megakernel_tts.server.cluster.channel import Channel
from megakernel_tts.server.cluster.engine_process import EngineProcess
from megakernel_tts.server.cluster.messages import (
    Cancel,
    Clone,
    ErrorInfo,
    Failed,
    Finished,
    Load,
    Loaded,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Refused,
    SessionRequest,
    Warm,
    pack_voice,
)
from tests.fakes import TIMEOUT_S

INFO = ModelInfo("base", {}, ("english",), False, None, "fake")
LOAD = Load("cpu:0", "fake", "cpu", 1, "text")
VOICE = Voice(np.ones(4, np.float32))


class FakeSession:
    """Yields given events; nothing more after a cancellation."""

    slot_wait_s = 0.0

    def __init__(self, events: list[AudioChunk | Finish]) -> None:
        self.finish: Finish | None = None
        self.cancelled = False
        self._events = events

    async def apush_text(self, text: str) -> None: ...

    def flush(self) -> None: ...

    def end(self) -> None: ...

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncGenerator[AudioChunk | Finish]:
        for event in self._events:
            yield event


class FakeEngine:
    """Opens given sessions.

    Attributes:
        running: Whether it has not failed.
        frame_step_s: Of its last step.
        opened: Voices of the sessions.
    """

    info, sampling, slots, warm = INFO, Sampling(), 1, True

    def __init__(self, session: FakeSession) -> None:
        self.running = True
        self.frame_step_s = 0.004
        self.opened: list[Any] = []
        self._session = session

    async def awarmup(self) -> None: ...

    async def aopen(self, voice: Any, *_: Any, **__: Any) -> FakeSession:
        self.opened.append(voice)
        return self._session

    def clone(self, wav: Any, text: str | None) -> Voice:
        raise ZeroDivisionError("a mistake")

    def close(self) -> None: ...


def make_open(session: int, voice: Voice | None = None) -> Open:
    cloned, body = pack_voice(voice) if voice is not None else (None, b"")
    request = SessionRequest(
        voice=None,
        cloned=cloned,
        language="auto",
        instruct=None,
        layout="auto",
        sampling=Sampling(),
        chunks=ChunkPolicy(),
        speed=1.0,
        pronunciations="{}",
        text="Hello.",
        priority=0,
    )
    return Open(session, 0, request, body)


class Front:
    """The front's end of a channel.

    Attributes:
        channel: To the engine process.
        closed: Set once the channel is closed.
    """

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self._received: asyncio.Queue[Message] = asyncio.Queue()
        self.channel = Channel(self._received.put_nowait, self.closed.set)

    async def receive(self) -> Message:
        return await asyncio.wait_for(self._received.get(), TIMEOUT_S)


async def connect(load: Callable[[Load], Any]) -> Front:
    """Connects a front to an engine process in this one."""
    memory = create_memory(1)
    process = EngineProcess(map_rings(memory), load, lambda: None)
    os.close(memory)
    front = Front()
    ours, theirs = socket.socketpair()
    await process.channel.connect(theirs)
    await front.channel.connect(ours)
    front.channel.send(LOAD)
    return front


async def loaded(engine: FakeEngine) -> Front:
    front = await connect(lambda _: engine)
    assert await front.receive() == Loaded(INFO, Sampling(), 1)
    assert await front.receive() == Warm()
    return front


async def close(front: Front) -> None:
    front.channel.close()
    await front.closed.wait()
    await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the log of the tests as it is."""
    module = "megakernel_tts.server.cluster.engine_process"
    monkeypatch.setattr(f"{module}._configure_logging", lambda request: None)


def test_an_engine_that_has_failed_ends_its_process_after_its_streams() -> None:
    async def main() -> None:
        engine = FakeEngine(FakeSession([Finish("error", 3, None)]))
        front = await loaded(engine)
        engine.running = False
        front.channel.send(make_open(1))
        assert await front.receive() == Opened(1)
        assert await front.receive() == Finished(1, "error", 3, None)
        async with asyncio.timeout(TIMEOUT_S):
            await front.closed.wait()

    asyncio.run(main())


def test_a_chunk_that_does_not_fit_the_ring_ends_its_stream_only() -> None:
    async def main() -> None:
        big = AudioChunk(np.zeros(RING_BYTES, np.int16), 24_000, np.zeros((1, 16), np.int64), 0)
        session = FakeSession([big])
        front = await loaded(FakeEngine(session))
        front.channel.send(make_open(1))
        assert await front.receive() == Opened(1)
        finished = await front.receive()
        assert isinstance(finished, Finished) and finished.reason == "error"
        assert "use smaller chunks" in str(finished.error)
        assert session.cancelled and not front.closed.is_set()
        await close(front)

    asyncio.run(main())


def test_a_cancellation_that_precedes_the_session_cancels_it() -> None:
    async def main() -> None:
        session = FakeSession([Finish("cancelled", 0)])
        front = await loaded(FakeEngine(session))
        front.channel.send(make_open(1))
        front.channel.send(Cancel(1))
        assert [await front.receive(), await front.receive()] == [
            Opened(1),
            Finished(1, "cancelled", 0, None),
        ]
        assert session.cancelled
        front.channel.send(Cancel(1))  # the session has ended: without effect
        await close(front)

    asyncio.run(main())


def test_the_same_cloned_voice_is_the_same_object() -> None:
    """By which an engine caches its prefix."""

    async def main() -> None:
        engine = FakeEngine(FakeSession([Finish("eos", 0)]))
        front = await loaded(engine)
        for number, voice in enumerate([VOICE, Voice(VOICE.x_vector), Voice(2 * VOICE.x_vector)]):
            front.channel.send(make_open(number, voice))
            assert await front.receive() == Opened(number)
            assert await front.receive() == Finished(number, "eos", 0, None)
        first, second, third = engine.opened
        assert first is second and second is not third
        await close(front)

    asyncio.run(main())


def test_an_answer_to_a_ping_has_the_time_of_a_frame() -> None:
    async def main() -> None:
        front = await loaded(FakeEngine(FakeSession([])))
        front.channel.send(Ping())
        assert await front.receive() == Pong(0.004)
        await close(front)

    asyncio.run(main())


def test_a_failed_load_is_reported_and_ends_the_process() -> None:
    def fail(_: Load) -> Any:
        raise ValueError("There is no such device.")

    async def main() -> None:
        front = await connect(fail)
        assert await front.receive() == Failed(ErrorInfo("ValueError", "There is no such device."))
        async with asyncio.timeout(TIMEOUT_S):
            await front.closed.wait()

    asyncio.run(main())


def test_a_mistake_in_the_engine_is_an_error_of_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        front = await loaded(FakeEngine(FakeSession([])))
        front.channel.send(Clone(1, None, b"RIFF"))
        error = ErrorInfo("MegakernelTTSError", "a mistake")
        assert await front.receive() == Refused(1, error)
        await close(front)

    asyncio.run(main())
    assert "ZeroDivisionError" in caplog.text
