"""Connections that break; the protocols' tests cover the others."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket

from megakernel_tts import TTS
from megakernel_tts.server.accounts import Account
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.speech_socket import SpeechSocket
from megakernel_tts.server.streams import SpeechStreams
from tests.fakes import TIMEOUT_S

TEXT: Message = {"type": "websocket.receive", "text": "a"}
BINARY: Message = {"type": "websocket.receive", "bytes": b"a"}
LOST: Message = {"type": "websocket.disconnect", "code": 1006}


class Connection:
    """What a web server passes to the application for one connection.

    Attributes:
        handled: Messages that the application has handled.
        sent: Types of the messages that it has sent.
    """

    def __init__(self, *messages: Message, broken: bool = False) -> None:
        """Receives messages, and then waits.

        Args:
            *messages: Messages of the client.
            broken: Whether nothing can be sent after the handshake.
        """
        self.handled: list[str] = []
        self.sent: list[str] = []
        self._messages: list[Message] = [{"type": "websocket.connect"}, *messages]
        self._broken = broken

    async def _receive(self) -> Message:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def _send(self, message: Message) -> None:
        if self._broken and message["type"] != "websocket.accept":
            raise OSError
        self.sent.append(message["type"])

    async def run(self, engine: TTS, *, close: bool = False) -> None:
        """Serves the connection with an application that answers each message.

        Args:
            engine: The engine.
            close: Whether the application closes the connection after the first one.
        """
        state = {"request_id": "req_1", "account": Account()}
        scope: dict[str, Any] = {"type": "websocket", "state": state, "headers": []}
        websocket = WebSocket(scope, self._receive, self._send)
        await websocket.accept()
        streams = SpeechStreams(engine, ServerSettings())
        socket: SpeechSocket[Any] = SpeechSocket(websocket, streams, "test")

        async def handle(data: str) -> None:
            self.handled.append(data)
            await socket.send({"answer": data})
            if close:
                socket.close()

        async with asyncio.timeout(TIMEOUT_S):
            await socket.run(handle)


@pytest.mark.parametrize("last", [LOST, BINARY], ids=["lost", "binary"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_connection_is_served_until_it_is_lost(engine: TTS, last: Message, broken: bool) -> None:
    connection = Connection(TEXT, TEXT, last, TEXT, broken=broken)
    asyncio.run(connection.run(engine))
    assert connection.handled == ["a", "a"]
    assert connection.sent[1:] == ([] if broken else ["websocket.send"] * 2)


@pytest.mark.parametrize("broken", [False, True])
def test_a_connection_that_the_application_closes_is_closed_once(engine: TTS, broken: bool) -> None:
    connection = Connection(TEXT, TEXT, broken=broken)
    asyncio.run(connection.run(engine, close=True))
    assert connection.handled == ["a"]
    assert connection.sent[1:] == ([] if broken else ["websocket.send", "websocket.close"])
