import asyncio
import queue
import threading
import time
from typing import Any, TypeVar

import numpy as np
import pytest
import websockets

from bench.simulation import simulated_tts, words_in_audio
from megakernel_tts import TTS, LivePolicy
from megakernel_tts.server.live_speech import MAX_PAUSE_S, LiveSpeech
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.speech_stream import SpeechStream
from tests.fakes import TIMEOUT_S
from tests.server.running import (
    TEXT,
    Client,
    RunningServer,
    connected,
    converse,
    pcm_of,
    running_server,
    until,
    wait_until,
    words_of,
)

LONG_TEXT = TEXT * 500

T = TypeVar("T")


def test_audio_and_word_starts_are_those_of_the_engine(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        await client.send("a", TEXT, add_timestamps=True)
        return await client.until_done("a")

    events = converse(server, act)
    speech = server.tts.say(TEXT)
    assert np.array_equal(pcm_of(events), speech.pcm)
    assert words_of(events) == [(word.text, word.start) for word in speech.words]
    first = next(event for event in events if event["type"] == "chunk")
    assert len(pcm_of([first])) == 1920, "more than the first frame"


@pytest.mark.parametrize("size", [1, 3, 100])
def test_every_word_of_text_in_portions_is_spoken_once(server: RunningServer, size: int) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        for start in range(0, len(TEXT), size):
            await client.send("a", TEXT[start : start + size], **{"continue": True})
        await client.send("a", "", **{"continue": False})
        return await client.until_done("a")

    assert words_in_audio(pcm_of(converse(server, act))) == [0, 1, 2, 3]


def test_words_precede_the_audio_in_which_they_begin(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        await client.send("a", TEXT, add_timestamps=True)
        return await client.until_done("a")

    seconds = 0.0
    for event in converse(server, act):
        if event["type"] == "timestamps":
            assert min(event["word_timestamps"]["start"]) >= seconds - 0.02
        elif event["type"] == "chunk":
            seconds += len(pcm_of([event])) / 24_000


def test_contexts_of_one_socket_speak_at_the_same_time(server: RunningServer) -> None:
    async def act(client: Client) -> dict[str, list[dict[str, Any]]]:
        events: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
        for name in events:
            await client.send(name, TEXT)
        while not all(e and e[-1]["done"] for e in events.values()):
            event = await client.receive()
            events[event["context_id"]].append(event)
        return events

    events = converse(server, act)
    assert all(np.array_equal(pcm_of(e), server.speech()) for e in events.values())


def test_sentences_without_a_space_between_them_are_separate_words(
    server: RunningServer,
) -> None:
    """Pipecat sends sentences so, and ends with an empty text."""

    async def act(client: Client) -> list[dict[str, Any]]:
        fields = {"max_buffer_delay_ms": 0, "add_timestamps": True}
        await client.send("a", "Hello there.", **fields, **{"continue": True})
        await client.send("a", "My friend.", **fields, **{"continue": True})
        await client.send("a", "", **{"continue": False})
        return await client.until_done("a")

    events = converse(server, act)
    assert [word for word, _ in words_of(events)] == ["Hello", "there.", "My", "friend."]
    assert [e["flush_id"] for e in events if e["type"] == "flush_done"] == [1, 2]


def test_portions_of_words_are_joined_as_they_are(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        for text in ("It costs 3.", "50 in all", ".", ""):
            await client.send("a", text, add_timestamps=True, **{"continue": bool(text)})
        return await client.until_done("a")

    words = [word for word, _ in words_of(converse(server, act))]
    assert words == ["It", "costs", "3.50", "in", "all."]


def test_a_flush_is_reported_after_its_audio_and_before_later_audio(
    server: RunningServer,
) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        await client.send("a", "One two.", flush=True, **{"continue": True})
        await client.send("a", " Three four.", **{"continue": False})
        return await client.until_done("a")

    events = converse(server, act)
    flush = next(i for i, e in enumerate(events) if e["type"] == "flush_done")
    assert words_in_audio(pcm_of(events[:flush])) == [0, 1]
    assert words_in_audio(pcm_of(events[flush:])) == [0, 1]


def test_flushed_text_is_spoken_while_the_context_stays_open(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        await client.send("a", "One two.", flush=True, **{"continue": True})
        events = [await client.receive()]
        while events[-1]["type"] != "flush_done":
            events.append(await client.receive())
        await client.cancel("a")
        return events

    assert words_in_audio(pcm_of(converse(server, act))) == [0, 1]


@pytest.mark.usefixtures("pauses")
def test_text_is_spoken_to_its_end_after_the_buffer_delay(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        await client.send("a", "One two three", max_buffer_delay_ms=50, **{"continue": True})
        events: list[dict[str, Any]] = []
        while words_in_audio(pcm_of(events)) != [0, 1, 2]:
            events.append(await client.receive())
        return events

    converse(server, act)


@pytest.mark.parametrize(("delay_ms", "seconds"), [(None, 3.0), (50, 0.05), (5000, 5.0)])
def test_the_buffer_delay_is_that_of_the_message(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, delay_ms: int | None, seconds: float
) -> None:
    limits = queue.Queue[float]()
    monkeypatch.setattr(
        LiveSpeech, "flush_when_paused", lambda _, max_pause_s=MAX_PAUSE_S: limits.put(max_pause_s)
    )

    async def act(client: Client) -> float:
        await client.send("a", "One tw", max_buffer_delay_ms=delay_ms, **{"continue": True})
        return await asyncio.to_thread(limits.get, timeout=TIMEOUT_S)

    assert converse(server, act) == seconds


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize(
    ("text", "early"), [("One two. ", True), ("One two ", True), ("One tw", False)]
)
def test_text_that_pauses_is_flushed_before_playback_ends_but_not_within_a_word(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, text: str, early: bool
) -> None:
    flushed = threading.Event()
    monkeypatch.setattr(SpeechStream, "flush", lambda stream: flushed.set())

    async def act(client: Client) -> None:
        await client.send("a", text, max_buffer_delay_ms=5000, **{"continue": True})
        assert await asyncio.to_thread(flushed.wait, TIMEOUT_S if early else 1.0) is early

    converse(server, act)


@pytest.mark.usefixtures("pauses")
def test_a_client_that_flushes_itself_may_pause(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = threading.Event()
    monkeypatch.setattr(SpeechStream, "flush", lambda stream: flushed.set())

    async def act(client: Client) -> None:
        fields = {"auto_flush": False, "max_buffer_delay_ms": 1}
        await client.send("a", "One two. ", **fields, **{"continue": True})
        await client.send("a", "Three four. ", max_buffer_delay_ms=1, **{"continue": True})
        await client.receive()
        assert not await asyncio.to_thread(flushed.wait, 0.3)
        await client.send("a", "", flush=True, **{"continue": True})
        assert await asyncio.to_thread(flushed.wait, TIMEOUT_S)

    converse(server, act)


@pytest.mark.parametrize("text", ["", " ", "...", "— !"])
def test_a_context_without_words_ends_at_once(server: RunningServer, text: str) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        await client.send("a", text, **{"continue": False})
        return await client.until_done("a")

    assert [event["type"] for event in converse(server, act)] == ["done"]


def test_nothing_is_sent_for_a_cancelled_context(server: RunningServer) -> None:
    async def act(client: Client) -> None:
        await client.send("a", LONG_TEXT)
        assert (await client.receive())["type"] == "chunk"
        await client.cancel("a")
        await client.send("b", TEXT)  # answered after what was sent for the first one
        while (event := await client.receive())["context_id"] == "a":
            pass
        events = [event, *await client.until_done("b")]
        assert np.array_equal(pcm_of(events), server.speech())
        await until(lambda: server.num_streams == 0)

    converse(server, act)


def test_closing_a_socket_stops_all_of_its_contexts(server: RunningServer) -> None:
    aborted = server.metric('requests_success_total{finished_reason="abort"}')

    async def act(client: Client) -> None:
        for name in ("a", "b", "c"):
            await client.send(name, LONG_TEXT)
        while server.metric("num_requests_running") < 3:
            await client.receive()

    converse(server, act)
    wait_until(lambda: server.num_streams == 0)
    assert server.metric('requests_success_total{finished_reason="abort"}') == aborted + 3
    # Those of other tests may be about to close.
    wait_until(lambda: server.metric("websocket_connections") == 0)


def test_cancellation_frees_the_slot_after_the_frame_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated_tts(num_slots=1, frame_seconds=0.1) as tts:
        tts._warm = True
        backend: Any = tts._loaded.engine.backend
        num_made: list[int] = []  # when the server closes a stream
        close = SpeechStream.close

        def recorded(stream: SpeechStream) -> None:
            if not stream._closed:
                num_made.append(backend.num_made)
            close(stream)

        monkeypatch.setattr(SpeechStream, "close", recorded)
        with running_server(tts) as server:

            async def act(client: Client) -> None:
                for i in range(3):
                    num_made.clear()
                    await client.send(f"{i}", LONG_TEXT)
                    while (await client.receive())["context_id"] != f"{i}":
                        pass
                    await client.cancel(f"{i}")
                    await until(lambda: server.num_streams == 0)
                    assert backend.num_made - num_made[0] <= 1

            converse(server, act)
            assert server.metric("cancel_latency_s_count") == 3


def test_text_after_the_end_of_a_context_is_an_error(server: RunningServer) -> None:
    async def act(client: Client) -> dict[str, Any]:
        await client.send("a", LONG_TEXT)
        await client.send("a", "More.")
        return (await client.until_done("a"))[-1]

    assert converse(server, act)["error_code"] == "context_closed"


def test_the_voice_of_a_context_cannot_change(server: RunningServer) -> None:
    async def act(client: Client) -> dict[str, Any]:
        await client.send("a", "Hello ", **{"continue": True})
        await client.send("a", "there.", voice={"id": "serena"})
        return (await client.until_done("a"))[-1]

    assert "voice" in converse(server, act)["message"]


def test_a_context_id_may_be_used_again_after_its_end(server: RunningServer) -> None:
    async def act(client: Client) -> None:
        for _ in range(2):
            await client.send("a", TEXT)
            assert np.array_equal(pcm_of(await client.until_done("a")), server.speech())

    converse(server, act)


def test_a_failure_is_an_error_and_others_continue(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.tts._loaded.engine.backend, "failing_word", "Failing")

    async def act(client: Client) -> None:
        await client.send("a", "Failing.")
        assert (await client.until_done("a"))[-1]["status_code"] == 500
        await client.send("b", TEXT)
        assert (await client.until_done("b"))[-1]["type"] == "done"

    converse(server, act)


def test_overload_is_an_error_message_and_the_handshake_does_not_wait(engine: TTS) -> None:
    with running_server(engine, ServerSettings(max_queue=0)) as server:

        async def act(client: Client) -> None:
            for i in range(engine.slots):
                await client.send(f"{i}", LONG_TEXT)
            await client.send("late", TEXT)
            error = (await client.until_done("late"))[-1]
            assert (error["type"], error["status_code"]) == ("error", 429)
            async with connected(server) as other:
                await other.send("late", TEXT)
                assert (await other.until_done("late"))[-1]["status_code"] == 429

        converse(server, act)


def test_a_stream_without_a_slot_is_refused_after_the_deadline(
    engine: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(engine) as server:

        async def act(client: Client) -> None:
            for i in range(engine.slots):
                await client.send(f"{i}", LONG_TEXT)
                while (await client.receive())["context_id"] != f"{i}":
                    pass
            hasty = ServerSettings(queue_timeout_s=0.05)
            monkeypatch.setattr(server.server.streams, "settings", hasty)
            await client.send("late", TEXT)
            error = (await client.until_done("late"))[-1]
            assert (error["type"], error["status_code"]) == ("error", 503)

        converse(server, act)
        assert server.metric('rejected_requests_total{reason="timeout"}') == 1


def test_speech_is_at_most_three_seconds_ahead_of_playback(server: RunningServer) -> None:
    async def act(client: Client) -> None:
        start_s = time.monotonic()
        frames = server.tts._loaded.engine.backend.num_made  # type: ignore[attr-defined]
        await client.send("a", LONG_TEXT)
        sent_s = 0.0
        while sent_s < 3.0:
            sent_s += len(pcm_of([await client.receive()])) / 24_000
        made = server.tts._loaded.engine.backend.num_made - frames  # type: ignore[attr-defined]
        played_s = time.monotonic() - start_s
        assert sent_s <= played_s + 2
        assert 0.08 * made <= played_s + 3

    converse(server, act)


def test_a_client_that_does_not_read_neither_delays_others_nor_stays(
    engine: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megakernel_tts.server.playback.MAX_BEHIND_S", 0.3)
    policy = LivePolicy(max_lead_s=1e9)  # is sent as fast as the client reads
    monkeypatch.setattr("megakernel_tts.server.speech_stream._LIVE", policy)

    async def act(server: RunningServer) -> None:
        async with connected(server, max_queue=1) as idle, connected(server) as client:
            idle_format = {"encoding": "pcm_f32le", "sample_rate": 48_000}
            await idle.send("a", LONG_TEXT, output_format=idle_format)
            await client.send("b", TEXT)
            assert np.array_equal(pcm_of(await client.until_done("b")), server.speech())
            await until(lambda: server.num_streams == 0)
            with pytest.raises(websockets.ConnectionClosed):
                async with asyncio.timeout(TIMEOUT_S):
                    while True:
                        await idle.websocket.recv()

    with running_server(engine) as server:
        asyncio.run(act(server))
