from typing import Any

import numpy as np
import pytest
import websockets

from bench.simulation import words_in_audio
from megakernel_tts import TTS
from tests.server.elevenlabs_client import Client, characters_of, converse, pcm_of, words_of
from tests.server.running import LOCKED, TEXT, RunningServer, running_server, until, wait_until

LONG_TEXT = TEXT * 500


def engine_words(server: RunningServer) -> list[tuple[str, float]]:
    return [(word.text, word.start) for word in server.tts.say(TEXT).words]


async def turn(client: Client) -> list[dict[str, Any]]:
    await client.say("a", TEXT)
    return await client.until_final("a")


@pytest.mark.parametrize("auto_mode", ["true", "false"])
def test_audio_and_words_are_those_of_the_engine(server: RunningServer, auto_mode: str) -> None:
    messages = converse(server, turn, auto_mode=auto_mode)
    assert np.array_equal(pcm_of(messages), server.speech())
    assert words_of(characters_of(messages)) == engine_words(server)
    assert all(message["contextId"] == "a" for message in messages)


def test_the_seed_of_the_url_is_that_of_the_engine(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int | None] = []
    open_session = server.tts.open

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        seeds.append(keywords["sampling"].seed)
        return open_session(*arguments, **keywords)

    monkeypatch.setattr(server.tts, "open", recorded)
    converse(server, turn, seed="7")
    assert seeds == [7]


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000])
@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_the_characters_of_a_message_last_as_long_as_its_audio(
    server: RunningServer, rate: int, speed: float
) -> None:
    """Clients that add up audio and clients that add up characters have the same clock."""

    async def turn_at_speed(client: Client) -> list[dict[str, Any]]:
        await client.say("a", TEXT, voice_settings={"speed": speed})
        return await client.until_final("a")

    messages = converse(server, turn_at_speed, output_format=f"pcm_{rate}")
    seconds = milliseconds = 0.0
    for message in messages[:-1]:
        seconds += len(pcm_of([message])) / rate
        alignment = message["alignment"]
        milliseconds += alignment["charStartTimesMs"][-1] + alignment["charDurationsMs"][-1]
        assert milliseconds == round(1000 * seconds)
    words = server.tts.say(TEXT, speed=speed).words
    assert words_of(characters_of(messages)) == [(word.text, word.start) for word in words]


def test_synchronous_alignments_have_times_of_the_context_and_the_text_alone(
    server: RunningServer,
) -> None:
    messages = converse(server, turn, sync_alignment="true")
    characters = characters_of(messages, synchronous=True)
    assert "".join(character for character, _ in characters) == f"{TEXT} "
    assert words_of(characters) == engine_words(server)


@pytest.mark.parametrize("size", [1, 3])
def test_text_in_portions_is_one_text(server: RunningServer, size: int) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        for start in range(0, len(TEXT), size):
            await client.send(text=TEXT[start : start + size], context_id="a")
        await client.send(context_id="a", flush=True)
        await client.send(context_id="a", close_context=True)
        return await client.until_final("a")

    messages = converse(server, act)
    assert words_in_audio(pcm_of(messages)) == [0, 1, 2, 3]
    assert [word for word, _ in words_of(characters_of(messages))] == TEXT.split()


def test_sentences_of_auto_mode_are_separate_words(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        for text in ("Hello there.", "My friend."):
            await client.send(text=text, context_id="a")
        await client.send(context_id="a", flush=True)
        await client.send(context_id="a", close_context=True)
        return await client.until_final("a")

    words = words_of(characters_of(converse(server, act, auto_mode="true")))
    assert [word for word, _ in words] == ["Hello", "there.", "My", "friend."]


def test_contexts_of_one_socket_speak_at_the_same_time(server: RunningServer) -> None:
    async def act(client: Client) -> dict[str | None, list[dict[str, Any]]]:
        messages: dict[str | None, list[dict[str, Any]]] = {"a": [], None: []}
        await client.say("a", TEXT)
        await client.send(text=TEXT, flush=True)  # without a name
        await client.send(close_context=True)
        while not all(m and m[-1]["isFinal"] for m in messages.values()):
            message = await client.receive()
            messages[message.get("contextId")].append(message)
        return messages

    messages = converse(server, act)
    assert all(np.array_equal(pcm_of(m), server.speech()) for m in messages.values())


def test_flushed_text_is_spoken_while_the_context_stays_open(server: RunningServer) -> None:
    async def act(client: Client) -> None:
        messages: list[dict[str, Any]] = []
        for number in (1, 2):
            await client.send(text="One two. ", context_id="a", flush=True)
            while words_in_audio(pcm_of(messages)) != [0, 1] * number:
                messages.append(await client.receive())

    converse(server, act)


async def speaking(client: Client, **flush: bool) -> None:
    """Begins a long turn."""
    await client.send(text=LONG_TEXT, context_id="a", **flush)
    assert (await client.receive())["audio"]


async def interrupt(client: Client) -> None:
    """Closes the context, and checks that nothing but its end follows."""
    await client.send(context_id="a", close_context=True)
    await client.say("b", TEXT)
    messages: list[dict[str, Any]] = []
    while not messages or not messages[-1]["isFinal"]:
        messages.append(await client.receive())
    while (message := await client.receive())["contextId"] == "a":
        raise AssertionError("a closed context sends more")
    assert message["contextId"] == "b"
    await client.until_final("b")


@pytest.mark.parametrize("closed", [False, True], ids=["unfinished turn", "finished turn"])
def test_an_interruption_stops_the_context(server: RunningServer, closed: bool) -> None:
    """Pipecat closes a context without a flush, or for the second time."""
    wait_until(lambda: server.num_streams == 0)
    aborted = server.metric('requests_success_total{finished_reason="abort"}')

    async def act(client: Client) -> None:
        await speaking(client)
        if closed:
            await client.send(context_id="a", flush=True)
            await client.send(context_id="a", close_context=True)
        await interrupt(client)
        await until(lambda: server.num_streams == 0)

    converse(server, act)
    assert server.metric('requests_success_total{finished_reason="abort"}') == aborted + 1


def test_closing_the_connection_stops_all_contexts(server: RunningServer) -> None:
    async def act(client: Client) -> None:
        for name in ("a", "b", "c"):
            await client.send(text=LONG_TEXT, context_id=name, flush=True)
        while server.metric("num_requests_running") < 3:
            await client.receive()

    converse(server, act)
    wait_until(lambda: server.num_streams == 0)
    # Those of other tests may be about to close.
    wait_until(lambda: server.metric("websocket_connections") == 0)


def test_close_socket_finishes_flushed_contexts_and_stops_others(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        await speaking(client)
        await client.send(text=TEXT, context_id="b", flush=True)
        await client.send(close_socket=True)
        await client.send(text=TEXT, context_id="c")  # is not spoken
        messages = await client.until_final("b")
        assert await client.close_frame() == (1000, "")
        return messages

    assert np.array_equal(pcm_of(converse(server, act)), server.speech())
    wait_until(lambda: server.num_streams == 0)


def test_close_socket_closes_a_connection_without_contexts(server: RunningServer) -> None:
    async def act(client: Client) -> tuple[int, str]:
        await client.send(text="")  # keeps the connection alive
        await client.send(context_id="unknown", close_context=True)
        await client.send(context_id="unknown", flush=True)
        await client.send(close_socket=True)
        return await client.close_frame()

    assert converse(server, act) == (1000, "")


@pytest.mark.parametrize("text", ["", "...", "— !"])
def test_a_context_without_words_ends_at_once(server: RunningServer, text: str) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        await client.say("a", text)
        return await client.until_final("a")

    assert converse(server, act) == [{"audio": None, "isFinal": True, "contextId": "a"}]


def test_a_context_that_is_not_used_ends_by_itself(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        await client.send(text=TEXT, context_id="a")
        return await client.until_final("a")

    messages = converse(server, act, inactivity_timeout="1")
    assert np.array_equal(pcm_of(messages), server.speech())


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"text": 3}, "invalid_value"),
        ({"text": TEXT, "flush": "yes"}, "invalid_value"),
        ({"text": "a\ud800b"}, "invalid_text"),
        ({"text": "a" * 70_000}, "text_too_long"),
    ],
    ids=["type", "flush", "surrogate", "length"],
)
def test_an_invalid_message_ends_its_context_alone(
    server: RunningServer, message: dict[str, Any], code: str
) -> None:
    async def act(client: Client) -> None:
        await client.send(context_id="a", **message)
        (error,) = await client.until_final("a")
        assert (error["error"], error["code"]) == (code, 1008)
        assert error["message"]
        await client.say("b", TEXT)
        assert pcm_of(await client.until_final("b")).size

    converse(server, act)
    assert server.num_streams == 0


def test_text_after_the_end_of_a_context_is_an_error(server: RunningServer) -> None:
    async def act(client: Client) -> dict[str, Any]:
        await client.say("a", LONG_TEXT)
        await client.send(context_id="a", text="")  # is none
        await client.send(context_id="a", flush=True)
        await client.send(context_id="a", text="More.")
        return (await client.until_final("a"))[-1]

    assert converse(server, act)["error"] == "context_closed"


def test_a_socket_has_a_limited_number_of_contexts(server: RunningServer) -> None:
    async def act(client: Client) -> dict[str, Any]:
        for number in range(65):
            await client.send(text=" ", context_id=f"{number}")
        return await client.receive()

    error = converse(server, act)
    assert (error["error"], error["contextId"]) == ("too_many_contexts", "64")


@pytest.mark.parametrize("path", ["multi-stream-input", "stream-input"])
@pytest.mark.parametrize(
    "query",
    [
        {"voice": "nobody"},
        {"output_format": "opus_48000_64"},
        {"output_format": "pcm_many"},
        {"language_code": "xx"},
        {"inactivity_timeout": "181"},
        {"inactivity_timeout": "0"},
        {"inactivity_timeout": "soon"},
        {"seed": "1.5"},
    ],
    ids=lambda query: str(*query.values()),
)
def test_an_invalid_url_is_refused_with_its_reason(
    server: RunningServer, path: str, query: dict[str, str]
) -> None:
    async def act(client: Client) -> None:
        error = await client.receive()
        assert str(*query.values()) in error["message"]
        code, reason = await client.close_frame()
        assert code == 1008 and error["message"].startswith(reason)

    converse(server, act, path, **query)


def test_an_invalid_key_is_refused_at_the_handshake(engine: TTS) -> None:
    with running_server(engine, LOCKED) as server:
        with pytest.raises(websockets.InvalidStatus) as caught:
            converse(server, turn)
        assert caught.value.response.status_code == 401
        assert pcm_of(converse(server, turn, api_key="secret")).size


def test_a_failure_is_an_error_and_others_continue(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.tts._loaded.engine.backend, "failing_word", "Failing")

    async def act(client: Client) -> None:
        await client.say("a", "Failing.")
        assert (await client.until_final("a"))[-1]["code"] == 1011
        await client.say("b", TEXT)
        assert pcm_of(await client.until_final("b")).size

    converse(server, act)


def test_a_single_text_is_spoken_and_the_connection_closed(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        for text in (" ", "Hello there, ", " ", "my friend.", ""):
            await client.send(text=text)
        messages = await client.until_final()
        assert await client.close_frame() == (1000, "")
        return messages

    messages = converse(server, act, "stream-input")
    assert words_in_audio(pcm_of(messages)) == [0, 1, 2, 3]
    assert [word for word, _ in words_of(characters_of(messages))] == TEXT.split()


def test_flushed_parts_of_a_single_text_are_spoken_before_its_end(server: RunningServer) -> None:
    async def act(client: Client) -> None:
        await client.send(text="One two. ")
        await client.send(text="", flush=True)
        messages: list[dict[str, Any]] = []
        while words_in_audio(pcm_of(messages)) != [0, 1]:
            messages.append(await client.receive())

    converse(server, act, "stream-input")


def test_a_single_text_that_is_not_continued_ends_by_itself(server: RunningServer) -> None:
    async def act(client: Client) -> None:
        assert await client.until_final() == [{"audio": None, "isFinal": True}]
        assert await client.close_frame() == (1000, "")

    converse(server, act, "stream-input", inactivity_timeout="1")


def test_an_error_of_a_single_text_closes_the_connection(server: RunningServer) -> None:
    async def act(client: Client) -> None:
        await client.send(text=LONG_TEXT)
        await client.websocket.send("{")
        assert (await client.until_final())[-1]["error"] == "invalid_json"
        assert (await client.close_frame())[0] == 1008

    converse(server, act, "stream-input")
    wait_until(lambda: server.num_streams == 0)
