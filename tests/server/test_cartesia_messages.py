import json
from typing import Any

import pytest

from tests.server.running import TEXT, Client, RunningServer, audio_of, converse, pcm_of


def test_details_are_added_on_request(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        fields = {"add_details": True, "add_timestamps": True}
        text = 'One two.<break time="0.16s"/>'
        await client.send("a", text, flush=True, **fields, **{"continue": True})
        await client.send("a", " Three.", **{"continue": False})
        return await client.until_done("a")

    events = converse(server, act)
    chunks = [event for event in events if event["type"] == "chunk"]
    assert [chunk["segment"] for chunk in chunks] == sorted(chunk["segment"] for chunk in chunks)
    for chunk in chunks:
        assert chunk["is_break"] == (not pcm_of([chunk]).any())
        assert chunk["slot_wait_s"] >= 0
    silence = sum(len(pcm_of([chunk])) for chunk in chunks if chunk["is_break"])
    assert silence == 0.16 * 24_000
    spoken = {chunk["segment"] for chunk in chunks if not chunk["is_break"]}
    assert len(spoken) == 2
    times = [event["word_timestamps"] for event in events if event["type"] == "timestamps"]
    assert [estimated for time in times for estimated in time["estimated"]] == [True] * 3
    assert events[-1]["finish_reason"] == "eos"


def test_details_are_not_added_otherwise(server: RunningServer) -> None:
    async def act(client: Client) -> list[dict[str, Any]]:
        await client.send("a", TEXT, add_timestamps=True)
        return await client.until_done("a")

    events = converse(server, act)
    fields = {name for event in events for name in (*event, *event.get("word_timestamps", ()))}
    assert fields.isdisjoint({"segment", "is_break", "slot_wait_s", "estimated", "finish_reason"})


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"voice": {"mode": "id", "id": "nobody"}}, "invalid_voice"),
        ({"voice": {"mode": "embedding", "embedding": [0.1]}}, "invalid_value"),
        ({"output_format": {"container": "mp3"}}, "invalid_value"),
        ({"output_format": {"encoding": "pcm_s24le", "sample_rate": 8000}}, "invalid_value"),
        ({"output_format": {"encoding": "pcm_s16le", "sample_rate": 8001}}, "invalid_value"),
        ({"language": "klingon"}, "invalid_language"),
        ({"transcript": None}, "invalid_value"),
        ({"transcript": "a\ud800b"}, "invalid_text"),
        ({"max_buffer_delay_ms": -1}, "invalid_value"),
        ({"continue": "yes"}, "invalid_value"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_an_invalid_message_is_an_error_of_its_context(
    server: RunningServer, fields: dict[str, Any], code: str
) -> None:
    async def act(client: Client) -> None:
        await client.send("a", TEXT, **fields)
        error = await client.receive()
        assert (error["type"], error["context_id"], error["done"]) == ("error", "a", False)
        assert (error["error_code"], error["status_code"]) == (code, 400)
        assert error["request_id"].startswith("req_") and error["title"] and error["message"]
        await client.send("b", TEXT)  # the socket remains usable
        assert (await client.until_done("b"))[-1]["type"] == "done"

    converse(server, act)
    assert server.num_streams == 0


@pytest.mark.parametrize("data", ["{", "[]", '"cancel"', "{}", '{"context_id": 3}'])
def test_a_message_without_context_is_an_error_with_an_empty_one(
    server: RunningServer, data: str
) -> None:
    async def act(client: Client) -> None:
        await client.websocket.send(data)
        assert (await client.receive())["context_id"] == ""

    converse(server, act)


@pytest.mark.parametrize(
    ("encoding", "width"),
    [("pcm_s16le", 2), ("pcm_f32le", 4), ("pcm_mulaw", 1), ("pcm_alaw", 1)],
)
@pytest.mark.parametrize("rate", [8_000, 48_000])
def test_every_encoding_and_rate_keeps_the_duration(
    server: RunningServer, encoding: str, width: int, rate: int
) -> None:
    async def act(client: Client) -> bytes:
        audio_format = {"container": "raw", "encoding": encoding, "sample_rate": rate}
        await client.send("a", TEXT, output_format=audio_format)
        return audio_of(await client.until_done("a"))

    seconds = len(converse(server, act)) / (rate * width)
    assert abs(seconds - len(server.speech()) / 24_000) < 1e-3
