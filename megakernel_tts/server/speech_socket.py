"""A WebSocket whose client speaks in live turns: what all protocols' sockets have in common."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic

from starlette.websockets import WebSocket, WebSocketDisconnect

from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.live_speech import L, LiveSpeech
from megakernel_tts.server.reports import Caller
from megakernel_tts.server.speech_stream import SpeechRequest
from megakernel_tts.server.streams import SpeechStreams

_MAX_SPEECHES = 64  # of a socket
_MAX_REASON_BYTES = 123  # of a close frame


class SpeechSocket(Generic[L]):
    """One connection. Messages are handled in order; speeches go on at the same time.

    Attributes:
        streams: The streams of the server.
        caller: Who requests its speeches.
        speeches: The open speeches, by the client's name for them.
    """

    def __init__(self, websocket: WebSocket, streams: SpeechStreams, protocol: str) -> None:
        """Takes over a connection whose handshake was answered.

        Args:
            websocket: The connection.
            streams: The streams of the server.
            protocol: Name of the protocol.
        """
        self.streams = streams
        self.caller = Caller.of(websocket.scope, protocol)
        self.speeches: dict[str, LiveSpeech[L]] = {}
        self._websocket = websocket
        self._sending = asyncio.Lock()  # fair, so that speeches take turns
        self._closing = asyncio.Event()
        self._close_frame: tuple[int, str] | None = None

    async def run(self, handle: Callable[[str], Awaitable[None]]) -> None:
        """Serves the connection until it closes, which stops all of its speeches.

        Args:
            handle: Handles a message; the next one is read when it returns.
        """
        with self.streams.websocket():
            reading = asyncio.create_task(self._read(handle))
            closing = asyncio.create_task(self._closing.wait())
            try:
                await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                reading.cancel()
                closing.cancel()
                for speech in [*self.speeches.values()]:
                    speech.cancel()
            if reading.done():
                await reading
            if self._close_frame is not None:
                await self._send_close(*self._close_frame)

    async def _read(self, handle: Callable[[str], Awaitable[None]]) -> None:
        # `receive_text` would raise another error once a message could not be sent.
        while (text := (await self._websocket.receive()).get("text")) is not None:
            await handle(text)
            if self._closing.is_set():
                return

    def open(
        self, name: str, request: SpeechRequest, listener: L, *, max_idle_s: float | None = None
    ) -> LiveSpeech[L]:
        """Opens a speech.

        Args:
            name: The client's name for it; no open speech has it.
            request: The stream.
            listener: See `LiveSpeech`.
            max_idle_s: See `LiveSpeech`.

        Raises:
            RequestError: Too many are open.
        """
        if len(self.speeches) >= _MAX_SPEECHES:
            raise RequestError(
                f"A socket has at most {_MAX_SPEECHES} contexts.", 429, "too_many_contexts"
            )
        speech = self.speeches[name] = LiveSpeech(
            self.streams,
            request,
            self.caller,
            listener,
            on_close=lambda: self.speeches.pop(name),
            on_slow_client=self._closing.set,
            max_idle_s=max_idle_s,
        )
        return speech

    async def send(self, message: Mapping[str, Any] | bytes) -> None:
        """Sends an object as JSON, or bytes; does nothing once the connection is closed."""
        async with self._sending:
            try:
                if isinstance(message, bytes):
                    await self._websocket.send_bytes(message)
                else:
                    await self._websocket.send_text(json.dumps(message))
            except (WebSocketDisconnect, RuntimeError):  # RuntimeError: it was closed before
                return

    def close(self, error: RequestError | None = None) -> None:
        """Ends `run`: closes the connection after what was sent, and stops all speeches.

        Args:
            error: The reason, unless the client has all that it requested.
        """
        self._close_frame = (1000, "") if error is None else (error.close_code, error.message)
        self._closing.set()

    async def refuse(
        self, code: int, reason: str, message: Mapping[str, Any] | None = None
    ) -> None:
        """Closes a connection instead of running it; most clients show no refused handshake.

        Args:
            code: Code of the close frame.
            reason: Why.
            message: Reports the reason as well, if the protocol has such a message.
        """
        if message is not None:
            await self.send(message)
        await self._send_close(code, reason)

    async def _send_close(self, code: int, reason: str) -> None:
        reason = reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
        async with self._sending:
            try:
                await self._websocket.close(code, reason)
            except (WebSocketDisconnect, RuntimeError):
                return
