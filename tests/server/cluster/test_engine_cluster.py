"""Sessions of two engine processes with simulated models, against the same model in process."""

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megakernel_tts import (
    TTS,
    AudioChunk,
    EngineBusyError,
    Finish,
    Pronunciations,
    TextError,
    VoiceError,
)
from megakernel_tts.server.cluster.engine_cluster import EngineCluster
from megakernel_tts.server.engine import SpeechEngine, SpeechSession
from tests.fakes import TIMEOUT_S
from tests.server.cluster.clusters import (
    CHUNKS,
    LONG_TEXT,
    TEXT,
    assert_equal_speech,
    open_session,
    read_all,
    read_chunks,
)
from tests.server.cluster.conftest import RunningCluster

Speech = tuple[list[AudioChunk], Finish]


class OneEngine(EngineCluster):
    """One of the engines of a cluster."""

    def __init__(self, running: RunningCluster, index: int) -> None:
        vars(self).update(vars(running.cluster))
        self._supervisors = running.cluster._supervisors[index : index + 1]


async def say(engine: SpeechEngine, text: str = TEXT) -> Speech:
    return await read_all(await open_session(engine, text))


def samples(speech: Speech) -> NDArray[np.int16]:
    return np.concatenate([chunk.pcm for chunk in speech[0]])


async def say_live(engine: SpeechEngine, portions: list[str]) -> Speech:
    session = await open_session(engine, None)
    for portion in portions:
        await session.apush_text(portion)
    session.end()
    return await read_all(session)


def test_it_describes_its_engines(running: RunningCluster, local: TTS) -> None:
    cluster = running.cluster
    assert cluster.info == local.info
    assert cluster.sampling == local.sampling
    assert cluster.slots == 2 * local.slots
    assert cluster.running and cluster.warm


def test_a_text_is_spoken_as_in_process(running: RunningCluster, local: TTS) -> None:
    ours = running.run(say(running.cluster))
    assert len(ours[0]) > 2 and ours[1].reason == "eos"
    assert_equal_speech(ours, asyncio.run(say(local)))


def test_every_word_of_live_text_is_spoken_in_order(running: RunningCluster) -> None:
    """Also around a long portion, which the engine reads on another thread."""
    portions = [*"One two three. ", LONG_TEXT, *"Four five six."]
    chunks, finish = running.run(say_live(running.cluster, portions))
    assert finish.reason == "eos"
    words = [word.text for chunk in chunks for word in chunk.words]
    assert words == "".join(portions).split()


def test_a_pause_of_the_text_is_flushed(running: RunningCluster) -> None:
    """Without a flush the engine waits for the end of the last word."""

    async def main() -> list[str]:
        session = await open_session(running.cluster, None)
        await session.apush_text("One two")
        session.flush()
        async with asyncio.timeout(TIMEOUT_S), aclosing(aiter(session)) as events:
            words: list[str] = []
            async for event in events:
                assert isinstance(event, AudioChunk)
                words += [word.text for word in event.words]
                if len(words) == 2:
                    break
        session.cancel()
        return words

    assert running.run(main()) == ["One", "two"]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ('One.<break time="1.7s"/> Two <spell>A1</spell>.', {}),
        ("The nginx server.", {"pronunciations": Pronunciations({"nginx": "engine ex"})}),
        (TEXT, {"speed": 1.5}),
    ],
    ids=["tags", "pronunciations", "speed"],
)
def test_speech_controls_are_those_of_the_engine(
    running: RunningCluster, local: TTS, text: str, options: dict[str, Any]
) -> None:
    async def say_with_options(engine: SpeechEngine) -> Speech:
        return await read_all(await open_session(engine, text, **options))

    ours, plain = running.run(say_with_options(running.cluster)), asyncio.run(say(local, text))
    assert_equal_speech(ours, asyncio.run(say_with_options(local)))
    if options:
        assert samples(ours).tolist() != samples(plain).tolist()


def test_streams_of_higher_priority_get_slots_first(running: RunningCluster) -> None:
    """All slots are occupied by long texts, which are read at once so that none is stalled."""

    async def main() -> tuple[list[int], list[float]]:
        engine = OneEngine(running, 0)
        ends: list[int] = []

        async def read(session: SpeechSession, priority: int) -> None:
            await read_all(session)
            ends.append(priority)

        async with asyncio.TaskGroup() as group:
            first = [await open_session(engine, LONG_TEXT, priority=1) for _ in range(engine.slots)]
            for session in first:
                group.create_task(read(session, 1))
            late = [await open_session(engine, TEXT, priority=p) for p in (2, 0)]
            for session, priority in zip(late, (2, 0), strict=True):
                group.create_task(read(session, priority))
        return ends, [session.slot_wait_s for session in (late[0], first[0])]

    ends, (waited_s, other_s) = running.run(main())
    assert ends.index(0) < ends.index(2)  # although that of priority 2 was opened before
    assert waited_s > other_s >= 0


def test_concurrent_streams_do_not_mix(running: RunningCluster, local: TTS) -> None:
    texts = [f"Stream {'abcdefghijkl'[i]} speaks about {i} things. " * 3 for i in range(12)]

    async def say_all(engine: SpeechEngine) -> list[Speech]:
        return await asyncio.gather(*(say(engine, text) for text in texts))

    ours = running.run(say_all(running.cluster))
    for one, two in zip(ours, asyncio.run(say_all(local)), strict=True):
        assert_equal_speech(one, two)


def test_a_session_is_opened_on_the_engine_with_the_fewest(running: RunningCluster) -> None:
    async def main() -> None:
        sessions = [await open_session(running.cluster, LONG_TEXT) for _ in range(5)]
        assert sorted(running.loads) == [2, 3]
        for session in sessions[:4:2]:  # every second one is on the same engine
            session.cancel()
            await read_all(session)
        assert sorted(running.loads) == [1, 2]
        sessions += [await open_session(running.cluster, LONG_TEXT)]
        assert running.loads == [2, 2]
        for session in sessions:
            session.cancel()

    running.run(main())


async def refused(running: RunningCluster, kind: type[Exception], message: str) -> None:
    voice, text = ("nobody", TEXT) if kind is VoiceError else (None, " \n")
    with pytest.raises(kind, match=message) as caught:
        await open_session(running.cluster, text, voice)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("kind", "message"), [(TextError, "nothing to say"), (VoiceError, "no voice 'nobody'")]
)
def test_errors_of_an_engine_have_their_class(
    running: RunningCluster, kind: type[Exception], message: str
) -> None:
    running.run(refused(running, kind, message))


def test_invalid_pushes_raise_at_once_and_the_stream_continues(running: RunningCluster) -> None:
    async def main() -> Finish:
        session = await open_session(running.cluster, None)
        with pytest.raises(TextError, match="not valid Unicode"):
            await session.apush_text("\ud800")
        await session.apush_text(TEXT)
        session.end()
        with pytest.raises(TextError, match="was ended"):
            await session.apush_text(TEXT)
        return (await read_all(session))[1]

    assert running.run(main()).reason == "eos"


def test_nothing_is_read_after_a_cancellation(running: RunningCluster) -> None:
    async def main() -> None:
        session = await open_session(running.cluster, LONG_TEXT)
        await read_chunks(session, 2)
        session.cancel()
        session.cancel()
        chunks, finish = await read_all(session)
        assert not chunks and finish.reason == "cancelled"
        assert session.finish is finish
        await session.apush_text(TEXT)  # without effect

    running.run(main())


def test_a_cancelled_prefix_is_that_of_the_whole(running: RunningCluster, local: TTS) -> None:
    async def begin(engine: SpeechEngine) -> list[list[int]]:
        session = await open_session(engine, LONG_TEXT)
        chunks = await read_chunks(session, 6)
        session.cancel()
        await read_all(session)
        return [codes for chunk in chunks for codes in chunk.codes.tolist()]

    ours, theirs = running.run(begin(running.cluster)), asyncio.run(begin(local))
    assert all(one == two for one, two in zip(ours, theirs, strict=False))


def test_a_request_that_is_dropped_while_it_opens_leaves_nothing(running: RunningCluster) -> None:
    async def main() -> None:
        opening = asyncio.create_task(open_session(running.cluster, LONG_TEXT))
        await asyncio.sleep(0)  # it sends its request
        assert sum(running.loads) == 1
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    running.run(main())  # checks that the engines become idle


def test_a_reader_that_stops_pauses_its_stream_only(running: RunningCluster) -> None:
    async def main() -> tuple[int, int]:
        engine = OneEngine(running, 0)
        slow, other = await open_session(engine, LONG_TEXT), await open_session(engine, TEXT * 10)
        (first,) = await read_chunks(slow, 1)
        _, finish = await read_all(other)
        slow.cancel()
        _, cancelled = await read_all(slow)
        # While `other` spoke, `slow` could have made as many frames.
        assert finish.frames > 3 * CHUNKS.ahead
        return len(first.codes), cancelled.frames

    num_read, num_made = running.run(main())
    in_ring = 1 + CHUNKS.largest
    assert num_read + CHUNKS.ahead <= num_made <= num_read + CHUNKS.ahead + in_ring


def test_more_sessions_than_an_engine_takes_are_refused(running: RunningCluster) -> None:
    async def main() -> None:
        engine = OneEngine(running, 0)
        sessions: list[SpeechSession] = []
        with pytest.raises(EngineBusyError, match="Try again later"):
            for _ in range(200):
                sessions.append(await open_session(engine, LONG_TEXT))
        assert len(sessions) == engine.slots + 64
        for session in sessions:
            session.cancel()

    running.run(main())
