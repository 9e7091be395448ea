"""Chunks, and the wake-ups of the readers."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from megakernel_common.events import ReaderWakeups
from megakernel_tts import AudioChunk, Finish, Session
from megakernel_tts.session import EventQueue


@pytest.mark.parametrize(
    ("pcm", "num_frames", "is_break"),
    [
        (np.zeros(1920, np.int16), 0, True),
        (np.zeros(0, np.int16), 0, False),  # words alone
        (np.zeros(1920, np.int16), 1, False),  # silence of the model
        (np.ones(1920, np.int16), 0, False),  # the rest of a segment at another speed
    ],
)
def test_only_silence_without_frames_is_a_break(
    pcm: np.ndarray, num_frames: int, is_break: bool
) -> None:
    assert AudioChunk(pcm, 24_000, np.zeros((num_frames, 16), np.int64), 0).is_break is is_break


def test_an_event_loop_is_woken_once_for_all_of_its_readers() -> None:
    """Whatever the number of sessions and events; every reader then has its events."""

    async def main() -> None:
        loop, wakeups = asyncio.get_running_loop(), ReaderWakeups()
        num_calls, call_soon_threadsafe = 0, loop.call_soon_threadsafe

        def count(*arguments: Any, **keywords: Any) -> asyncio.Handle:
            nonlocal num_calls
            num_calls += 1
            return call_soon_threadsafe(*arguments, **keywords)

        loop.call_soon_threadsafe = count  # type: ignore[method-assign]
        queues = [EventQueue(lambda: None, lambda: None, wakeups=wakeups) for _ in range(64)]
        sessions = [Session(_NoText(), queue, lambda: None) for queue in queues]  # type: ignore[arg-type]
        readers = [asyncio.ensure_future(_read(session)) for session in sessions]
        await asyncio.sleep(0)

        def deliver() -> None:
            for queue in queues:
                for frame in range(3):
                    queue.put(_chunk(frame))
                queue.put(Finish("eos", 3))
            wakeups.wake()
            wakeups.wake()  # without new events

        thread = threading.Thread(target=deliver)
        thread.start()
        assert await asyncio.gather(*readers) == [[0, 1, 2]] * 64
        thread.join()
        assert num_calls == 1

    asyncio.run(main())


def test_a_session_is_abandoned_if_its_event_loop_is_closed() -> None:
    wakeups, abandoned = ReaderWakeups(), list[int]()
    queues = [
        EventQueue(lambda: None, lambda i=i: abandoned.append(i), wakeups=wakeups) for i in range(2)
    ]
    loop = asyncio.new_event_loop()
    queues[0].set_waiter(loop, asyncio.Event())
    loop.close()
    for queue in queues:
        queue.put(_chunk(0))
    wakeups.wake()
    assert abandoned == [0] and queues[0].abandoned and not queues[1].abandoned


class _NoText:
    """A text queue of a session whose text does not matter."""


def _chunk(frame: int) -> AudioChunk:
    return AudioChunk(np.zeros(1920, np.int16), 24_000, np.zeros((1, 16), np.int64), frame)


async def _read(session: Session) -> list[int]:
    return [event.frame async for event in session if isinstance(event, AudioChunk)]


def test_a_session_that_was_read_to_its_end_does_not_wake_the_engine() -> None:
    """The engine has left its stream; a wake-up would be in the way of the next request."""
    calls = list[str]()
    wakeups = ReaderWakeups()
    queue = EventQueue(
        lambda: calls.append("read"), lambda: calls.append("abandoned"), wakeups=wakeups
    )
    for event in (_chunk(0), Finish("eos", 1)):
        queue.put(event)
    session = Session(_NoText(), queue, lambda: None)  # pyright: ignore[reportArgumentType]
    with session:
        assert [type(event) for event in session] == [AudioChunk, Finish]
    del session
    assert calls == ["read"]


def test_a_session_that_is_left_or_dropped_before_its_end_wakes_the_engine() -> None:
    for leave in (Session.cancel, lambda session: None):
        calls = list[str]()
        queue = EventQueue(lambda: None, lambda calls=calls: calls.append("abandoned"))
        session = Session(_NoText(), queue, lambda: None)  # pyright: ignore[reportArgumentType]
        leave(session)
        del session
        assert calls and queue.abandoned
