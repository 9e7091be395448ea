import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from megakernel_tts.server import word_times
from tests.server.running import TEXT, RunningServer

HEADER, OMITTED = "x-word-timestamps", "x-word-timestamps-omitted"


def speak(server: RunningServer, text: str = TEXT, **fields: Any) -> httpx.Response:
    body = {"input": text, "response_format": "pcm", "word_timestamps": True} | fields
    return httpx.post(f"{server.url}/v1/audio/speech", json=body)


def expected(server: RunningServer, text: str = TEXT) -> list[tuple[str, int]]:
    """The words of the engine and their starts in milliseconds."""
    return [(word.text, round(1000 * word.start)) for word in server.tts.say(text).words]


def starts(words: list[dict[str, Any]]) -> list[tuple[str, int]]:
    assert all({*word} == {"word", "start_ms", "end_ms"} for word in words)
    return [(word["word"], word["start_ms"]) for word in words]


def test_the_header_has_the_words_of_the_engine(server: RunningServer) -> None:
    reply = speak(server)
    words = json.loads(reply.headers[HEADER])
    assert starts(words) == expected(server)
    ends = [word["end_ms"] for word in words]
    assert ends[:-1] == [word["start_ms"] for word in words[1:]]
    assert ends[-1] > words[-1]["start_ms"]
    assert OMITTED not in reply.headers
    assert np.array_equal(np.frombuffer(reply.content, "<i2"), server.speech())


@pytest.mark.parametrize("text", ["你好，世界。", "Déjà vu"])
def test_the_header_is_ascii(server: RunningServer, text: str) -> None:
    assert starts(json.loads(speak(server, text).headers[HEADER])) == expected(server, text)


def test_a_text_without_words_has_none(server: RunningServer) -> None:
    assert speak(server, "<break time='0.2s'/>").headers[HEADER] == "[]"


def test_words_that_do_not_fit_are_omitted_and_the_audio_is_whole(server: RunningServer) -> None:
    text = "One two three four five. " * 40
    reply = speak(server, text)
    assert HEADER not in reply.headers and reply.headers[OMITTED] == "true"
    assert np.array_equal(np.frombuffer(reply.content, "<i2"), server.speech(text))


def test_audio_that_is_held_back_is_bounded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_times, "_MAX_HELD_BYTES", 10_000)
    reply = speak(server)
    assert HEADER not in reply.headers and reply.headers[OMITTED] == "true"
    assert np.array_equal(np.frombuffer(reply.content, "<i2"), server.speech())


def test_events_have_the_words_that_begin_in_their_audio(server: RunningServer) -> None:
    lines = speak(server, stream_format="sse").text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    sent_ms, words = 0.0, list[dict[str, Any]]()
    for event in events[:-1]:
        end_ms = sent_ms + len(base64.b64decode(event["audio"])) / 48
        for word in event.get("timestamps", ()):
            assert sent_ms <= word["start_ms"] < end_ms
            words.append(word)
        sent_ms = end_ms
    assert starts(words) == expected(server)


def test_replies_have_none_unless_they_were_asked_for(server: RunningServer) -> None:
    reply = speak(server, word_timestamps=False)
    assert HEADER not in reply.headers and OMITTED not in reply.headers
    assert "timestamps" not in speak(server, word_timestamps=None, stream_format="sse").text


def test_another_value_than_a_boolean_is_refused(server: RunningServer) -> None:
    reply = speak(server, word_timestamps="yes")
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "word_timestamps"
