"""One stream in an engine process: the front's text to a session, its events to the front."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from megakernel_tts import AudioChunk, Finish, MegakernelTTSError
from megakernel_tts.server.cluster.audio_ring import RingWriter
from megakernel_tts.server.cluster.channel import Channel
from megakernel_tts.server.cluster.messages import (
    Cancel,
    Chunk,
    End,
    ErrorInfo,
    Finished,
    Flush,
    Opened,
    PushText,
    Refused,
    Release,
)
from megakernel_tts.server.engine import SpeechSession
from megakernel_tts.server.failures import FailureLog

_log = logging.getLogger("megakernel_tts.server")

_MAX_UNREAD_BYTES = 4 << 10  # one frame in the ring: with more, the next chunk waits


class ServedStream:
    """Opens a session and serves it to its end.

    Attributes:
        task: Ends after `Refused` or `Finished` was sent.
    """

    def __init__(
        self,
        number: int,
        open_session: Callable[[], Awaitable[SpeechSession]],
        writer: RingWriter,
        channel: Channel,
        failures: FailureLog,
    ) -> None:
        """Starts the task.

        Args:
            number: The session's number in messages.
            open_session: Opens the session.
            writer: Of the session's ring.
            channel: To the front.
            failures: The log of failed streams.
        """
        self._number = number
        self._open_session = open_session
        self._writer = writer
        self._channel = channel
        self._failures = failures
        self._opened_s = time.monotonic()
        self._session: SpeechSession | None = None
        self._cancelled = False
        self._text: asyncio.Queue[PushText | Flush | End] = asyncio.Queue()
        self._released = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def receive(self, message: PushText | Flush | End | Cancel | Release) -> None:
        """Handles a message for this session."""
        match message:
            case Release(position=position):
                self._writer.release(position)
                self._released.set()
            case Cancel():
                self._cancelled = True
                self._released.set()
                if self._session is not None:
                    self._session.cancel()
            case _:
                self._text.put_nowait(message)

    async def _run(self) -> None:
        try:
            session = self._session = await self._open_session()
        except Exception as error:
            self._channel.send(Refused(self._number, describe_error(error)))
            return
        if self._cancelled:
            session.cancel()
        self._channel.send(Opened(self._number))
        writing = asyncio.create_task(self._write_text(session))
        try:
            finish = await self._send_audio(session)
            error = None
            if finish.error is not None:
                self._failures.add(finish.error, self._opened_s)
                error = str(finish.error)
            finished = Finished(self._number, finish.reason, finish.frames, error)
        except Exception as error:
            session.cancel()
            finished = Finished(self._number, "error", 0, describe_error(error).message)
        finally:
            writing.cancel()
        self._channel.send(finished)

    async def _write_text(self, session: SpeechSession) -> None:
        """Passes text on, in order: a long one is tokenised on another thread."""
        while True:
            match await self._text.get():
                case PushText(text=text):
                    await session.apush_text(text)
                case Flush():
                    session.flush()
                case End():
                    session.end()

    async def _send_audio(self, session: SpeechSession) -> Finish:
        """Sends each chunk once the ring has space; without it, the engine pauses the stream."""
        async with aclosing(aiter(session)) as events:
            async for event in events:
                if not isinstance(event, AudioChunk):
                    return event
                self._writer.write(event)
                self._channel.send(
                    Chunk(self._number, len(event.codes), event.words, session.slot_wait_s)
                )
                while self._writer.num_unread > _MAX_UNREAD_BYTES and not self._cancelled:
                    self._released.clear()
                    await self._released.wait()
        raise AssertionError("the session ended without a finish")


def describe_error(error: Exception) -> ErrorInfo:
    """Describes an error for the front; one that is not about the request is logged as well."""
    if not isinstance(error, MegakernelTTSError | ValueError):
        _log.error("A request has failed.", exc_info=error)
    return ErrorInfo.of(error)
