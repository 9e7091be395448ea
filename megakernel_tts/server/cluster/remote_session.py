"""A session of an engine process, as the front's protocols use it."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from megakernel_tts import AudioChunk, Finish, TextError
from megakernel_tts.server.cluster.audio_ring import RingReader
from megakernel_tts.server.cluster.messages import (
    Cancel,
    Chunk,
    End,
    Flush,
    Message,
    PushText,
    Release,
)
from megakernel_tts.server.errors import EngineProcessError


class RemoteSession:
    """A `SpeechSession` whose session is in an engine process. Used on the event loop only.

    Audio stays in the ring until the reader takes it, so a slow reader fills the ring, which pauses
    its stream.

    Attributes:
        opened: Done once the engine has opened or refused the session.
    """

    def __init__(
        self,
        number: int,
        reader: RingReader,
        send: Callable[[Message], None],
        on_ring_unused: Callable[[], None],
    ) -> None:
        """Starts before the engine has opened it.

        Args:
            number: Its number in messages.
            reader: Of its ring.
            send: Sends a message to the engine process.
            on_ring_unused: Called once, when neither end uses the ring any more.
        """
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number = number
        self._reader = reader
        self._send = send
        self._on_ring_unused = on_ring_unused
        self._events: deque[Chunk | Finish] = deque()
        self._arrived = asyncio.Event()
        self._num_frames = 0
        self._text_ended = False
        self._cancelled = False
        self._ended = False  # in the engine process
        self._finish: Finish | None = None
        self._slot_wait_s = 0.0

    # --- for the front ---

    @property
    def finish(self) -> Finish | None:
        """The stream's last event, once it was read."""
        return self._finish

    @property
    def slot_wait_s(self) -> float:
        """Seconds for which the stream waited for a slot before the audio that has arrived."""
        return self._slot_wait_s

    async def apush_text(self, text: str) -> None:
        """See `SpeechSession`."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"The text is not valid Unicode ({error.reason}).") from None
        if self._text_ended:
            raise TextError("The session's text was ended; open a new session for more.")
        self._send(PushText(self._number, text))

    def flush(self) -> None:
        """See `SpeechSession`."""
        self._send(Flush(self._number))

    def end(self) -> None:
        """See `SpeechSession`."""
        self._text_ended = True
        self._send(End(self._number))

    def cancel(self) -> None:
        """See `SpeechSession`."""
        if self._cancelled or self._finish is not None:
            return
        self._cancelled = True
        self._events = deque(event for event in self._events if isinstance(event, Finish))
        if self._ended:
            self._on_ring_unused()
        else:
            self._send(Cancel(self._number))

    async def __aiter__(self) -> AsyncGenerator[AudioChunk | Finish]:
        loop = asyncio.get_running_loop()
        while self._finish is None:
            if not self._events:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            event = self._events.popleft()
            if isinstance(event, Chunk):
                chunk = self._reader.read(event.words)
                release = Release(self._number, self._reader.position)
                loop.call_soon(self._send, release)  # a reader that does not wait goes first
                yield chunk
            else:
                self._finish = event
                if not self._cancelled:
                    self._on_ring_unused()
                yield event

    # --- for the engine's client ---

    def receive(self, chunk: Chunk) -> None:
        """Adds a chunk, which is in the ring."""
        self._num_frames += chunk.num_frames
        self._slot_wait_s = chunk.slot_wait_s
        if not self._cancelled:
            self._events.append(chunk)
            self._arrived.set()

    def receive_finish(self, finish: Finish) -> None:
        """Adds the last event."""
        self._ended = True
        self._events.append(finish)
        self._arrived.set()
        if self._cancelled:
            self._on_ring_unused()

    def refuse(self, error: Exception) -> None:
        """Has `opened` raise an error."""
        self._on_ring_unused()
        if not self.opened.done():  # the request may have been cancelled
            self.opened.set_exception(error)

    def fail(self, message: str) -> None:
        """Ends the session with an error, after the audio that has arrived."""
        self.receive_finish(Finish("error", self._num_frames, EngineProcessError(message)))
