import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from pipecat.utils.errors import ErrorCategory

from megakernel_tts import Finish, TextError, Word
from pipecat_service.errors import ServerError
from pipecat_service.remote_session import ReceivedChunk, RemoteSession

FIELDS = {"voice": {"id": "ryan"}}


class Server:
    """What a session sends, and the session."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.num_finishes = 0
        self.session = RemoteSession("http://x", FIELDS, self._receive, self._finish)

    def _receive(self, message: Any) -> None:
        self.messages.append(message)

    def _finish(self) -> None:
        self.num_finishes += 1

    def events(self) -> list[ReceivedChunk | Finish]:
        """The events up to the end."""

        async def collect() -> list[ReceivedChunk | Finish]:
            return [event async for event in self.session]

        return asyncio.run(collect())


def chunk(num_samples: int = 1920, **fields: Any) -> dict[str, Any]:
    data = base64.b64encode(np.ones(num_samples, "<i2").tobytes()).decode()
    details = {"segment": 0, "is_break": False, "slot_wait_s": 0.0}
    return {"type": "chunk", "data": data, **details, **fields}


def text(transcript: str, *, more: bool = True, flush: bool = False) -> dict[str, Any]:
    return {"transcript": transcript, "continue": more, "flush": flush}


def words(*starts: float) -> dict[str, Any]:
    times = {"words": ["a"] * len(starts), "start": starts, "estimated": [False] * len(starts)}
    return {"type": "timestamps", "word_timestamps": times}


def test_the_first_text_opens_the_context() -> None:
    server = Server()
    server.session.flush()  # without text
    server.session.push_text("One ")
    server.session.flush()
    server.session.push_text("two.")
    server.session.end()
    server.session.end()
    server.session.flush()
    assert server.messages == [
        FIELDS | text("One "), text("", flush=True), text("two."), text("", more=False),
    ]  # fmt: skip
    with pytest.raises(TextError, match="was ended"):
        server.session.push_text("three")


def test_words_come_with_the_audio_in_which_they_begin() -> None:
    server = Server()
    server.session.push_text("a a a")
    server.session.end()
    for event in (
        words(0.0, 0.04), chunk(), chunk(segment=1, is_break=True, slot_wait_s=0.5), words(0.2),
        {"type": "flush_done", "flush_id": 1}, {"type": "done", "finish_reason": "eos"},
    ):  # fmt: skip
        server.session.receive(event)
    first, second, last, finish = server.events()
    assert isinstance(first, ReceivedChunk) and isinstance(second, ReceivedChunk)
    assert isinstance(last, ReceivedChunk)
    assert first.words == (Word("a", 0.0, None, False), Word("a", 0.04, None, False))
    assert (first.segment, first.is_break, len(first.pcm)) == (0, False, 1920)
    assert (second.segment, second.is_break, second.words) == (1, True, ())
    assert len(last.pcm) == 0 and len(last.words) == 1
    assert finish == Finish("eos", 2)
    assert server.session.slot_wait_s == 0.5 and server.session.aligned
    assert server.num_finishes == 1 and {"cancel": True} not in server.messages


def test_nothing_is_read_or_sent_after_a_cancellation() -> None:
    server = Server()
    server.session.push_text("a a")
    server.session.receive(chunk())
    server.session.cancel()
    server.session.cancel()
    server.session.push_text("more")
    server.session.end()
    assert server.events() == [Finish("cancelled", 1)]
    assert server.messages == [FIELDS | text("a a"), {"cancel": True}]
    assert server.num_finishes == 1


def test_a_cancellation_discards_audio_that_was_not_read() -> None:
    server = Server()
    server.session.push_text("a")
    server.session.end()
    server.session.receive(chunk())
    server.session.receive({"type": "done", "finish_reason": "eos"})
    server.session.cancel()
    assert server.events() == [Finish("cancelled", 1)]
    assert {"cancel": True} not in server.messages and server.num_finishes == 1


def test_a_cancellation_ends_an_iteration_that_waits() -> None:
    async def run() -> ReceivedChunk | Finish:
        server = Server()
        server.session.push_text("a")
        reading = asyncio.create_task(anext(aiter(server.session)))
        await asyncio.sleep(0)
        server.session.cancel()
        return await reading

    assert asyncio.run(run()) == Finish("cancelled", 0)


def test_a_session_without_text_is_unknown_to_the_server() -> None:
    server = Server()
    server.session.cancel()
    assert server.messages == []


@pytest.mark.parametrize("reason", ["length", "guard"])
def test_speech_that_is_cut_off_ends_its_context(reason: str) -> None:
    """Text that is under way would open the context again."""
    server = Server()
    server.session.push_text("a a")
    server.session.receive({"type": "done", "finish_reason": reason})
    assert server.messages[-1] == {"cancel": True}
    server.session.push_text("a")
    assert server.messages[-1] == {"cancel": True}
    assert server.events() == [Finish(reason, 0)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "code", "category"),
    [
        (400, "invalid_voice", ErrorCategory.INVALID_REQUEST),
        (400, "invalid_text", ErrorCategory.APPLICATION),
        (400, "text_too_long", ErrorCategory.APPLICATION),
        (429, "overloaded", ErrorCategory.RATE_LIMIT),
        (503, "overloaded", ErrorCategory.SERVER),
        (500, "synthesis_failed", ErrorCategory.SERVER),
    ],
)
def test_an_error_follows_the_audio_before_it(
    status: int, code: str, category: ErrorCategory
) -> None:
    server = Server()
    server.session.push_text("a a")
    server.session.receive(chunk())
    event = {"type": "error", "status_code": status, "error_code": code, "message": "It failed."}
    server.session.receive(event)
    first, finish = server.events()
    assert isinstance(first, ReceivedChunk) and isinstance(finish, Finish)
    assert finish.reason == "error" and isinstance(finish.error, ServerError)
    assert str(finish.error) == "It failed. (the server at http://x)"
    assert finish.error.category is category
    assert server.messages[-1] == {"cancel": True}
