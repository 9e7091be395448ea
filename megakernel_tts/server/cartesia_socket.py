"""Cartesia's WebSocket: messages to contexts, which speak at the same time."""

import asyncio
import json
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from megakernel_tts.server import cartesia_messages as messages
from megakernel_tts.server.cartesia_context import Context
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import get_field, parse_object
from megakernel_tts.server.streams import SpeechStreams

_MAX_CONTEXTS = 64  # of a socket


class CartesiaSocket:
    """One connection. Messages are handled in order; contexts speak at the same time."""

    def __init__(self, websocket: WebSocket, streams: SpeechStreams) -> None:
        """Takes over a connection whose handshake has not been answered."""
        self.streams = streams
        self.request_id: str = websocket.scope["state"]["request_id"]
        self.contexts: dict[str, Context] = {}
        self._websocket = websocket
        self._sending = asyncio.Lock()  # fair, so that contexts take turns
        self._too_slow = asyncio.Event()

    async def run(self) -> None:
        """Serves the connection until it closes, which stops all of its contexts."""
        await self._websocket.accept()
        reading = asyncio.create_task(self._read())
        too_slow = asyncio.create_task(self._too_slow.wait())
        try:
            await asyncio.wait({reading, too_slow}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            too_slow.cancel()
            for context in [*self.contexts.values()]:
                context.cancel()
        if reading.done():
            await reading

    def close_slow(self) -> None:
        """Ends the connection of a client that does not read."""
        self._too_slow.set()

    async def _read(self) -> None:
        try:
            while True:
                await self._handle(await self._websocket.receive_text())
        except (WebSocketDisconnect, KeyError):  # KeyError: a binary message
            return

    async def _handle(self, data: str) -> None:
        context_id = ""
        try:
            message = parse_object(data)
            context_id = get_field(message, "context_id", str, "")
            if not context_id:
                raise RequestError("A message needs a context_id.", parameter="context_id")
            await self._dispatch(context_id, message)
        except RequestError as error:
            if context := self.contexts.get(context_id):
                context.cancel()
            await self.send(context_id, messages.error_event(error, self.request_id))

    async def _dispatch(self, context_id: str, message: dict[str, Any]) -> None:
        context = self.contexts.get(context_id)
        more = get_field(message, "continue", bool, False)
        if get_field(message, "cancel", bool, False):
            if context is not None:
                context.cancel()
            return
        if context is None:
            if len(self.contexts) >= _MAX_CONTEXTS:
                raise RequestError(
                    f"A socket has at most {_MAX_CONTEXTS} contexts.", 429, "too_many_contexts"
                )
            if not more and not messages.transcript_of(message).strip():
                await self.send(context_id, messages.done_event())
                return
            request = messages.speech_request(message, self.streams, text=None, paced=True)
            context = self.contexts[context_id] = Context(self, context_id, message, request)
        await context.add(message)

    async def send(self, context_id: str, event: dict[str, Any]) -> None:
        """Sends an event of a context; does nothing once the connection is closed."""
        text = json.dumps(event | {"context_id": context_id})
        async with self._sending:
            try:
                await self._websocket.send_text(text)
            except (WebSocketDisconnect, RuntimeError):  # RuntimeError: it was closed before
                return
