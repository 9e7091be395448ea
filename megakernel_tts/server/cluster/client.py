"""The front's side of one engine process: starts it, and opens sessions on it."""

import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from itertools import count

from megakernel_tts import EngineBusyError, EngineClosedError, Voice
from megakernel_tts.server.cluster.audio_ring import RingReader, create_memory, map_rings
from megakernel_tts.server.cluster.channel import Channel
from megakernel_tts.server.cluster.messages import (
    Chunk,
    Clone,
    Cloned,
    Failed,
    Finished,
    Load,
    Loaded,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Refused,
    SessionRequest,
    Warm,
    unpack_voice,
)
from megakernel_tts.server.cluster.remote_session import RemoteSession

_log = logging.getLogger("megakernel_tts.server")

_MAX_WAITING = 64  # sessions beyond the engine's slots: as many as an engine accepts
_EXIT_TIMEOUT_S = 5.0  # from the end of the channel to that of the process
# A process hangs if it answers none of this many pings. Pings are counted, not seconds, so that a
# front that was suspended itself does not end its engines.
_MAX_MISSED_PINGS, _PING_INTERVAL_S = 10, 1.0


class EngineClient:
    """One engine process. All methods are called on the event loop that started it.

    Attributes:
        name: Of its GPU, for logs.
        loaded: The model.
        warm: Whether sessions can be opened: the engine is warm, and the process has not ended.
        frame_step_s: Of the engine, at its last answer to a ping; see `SpeechEngine`.
    """

    loaded: Loaded

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        rings: Sequence[memoryview],
        on_change: Callable[[], None],
    ) -> None:
        """Takes over a process that was started; `start` calls it."""
        self.name = name
        self.warm = False
        self.frame_step_s = 0.0
        self._process = process
        self._rings = rings
        self._on_change = on_change
        self._free_rings = [*reversed(range(len(rings)))]
        self._sessions: dict[int, RemoteSession] = {}
        self._cloning: dict[int, asyncio.Future[Voice]] = {}
        self._numbers = count()
        self._loading: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self._num_missed = 0  # pings in a row without an answer
        self._answered = False  # since the last one
        self._pinging: asyncio.Task[None] | None = None
        self._channel = Channel(self._receive, self._end)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: dict[str, str],
        request: Load,
        on_change: Callable[[], None],
    ) -> "EngineClient":
        """Starts a process and waits until it has loaded the model.

        Args:
            command: Runs `engine_process`; the descriptors are added to it.
            environment: All variables of the process.
            request: What to load.
            on_change: Called when the engine becomes warm, and when its process ends.

        Raises:
            MegakernelTTSError: The model cannot be loaded.
            ValueError: The device is invalid.
            OSError: The process cannot be started.
        """
        process, end, rings = _spawn(command, environment, request.slots + _MAX_WAITING)
        client = cls(request.name, process, rings, on_change)
        try:
            await client._channel.connect(end)
            client._channel.send(request)
            client.loaded = await client._loading
        except BaseException:
            client.close()
            process.kill()
            await asyncio.to_thread(process.wait)
            raise
        return client

    @property
    def slots(self) -> int:
        """Number of streams that can speak at once."""
        return self.loaded.slots

    @property
    def num_sessions(self) -> int:
        """Number of sessions that the engine has not ended."""
        return len(self._sessions)

    async def open(self, request: SessionRequest, voice: bytes) -> RemoteSession:
        """Opens a session.

        Args:
            request: What it speaks.
            voice: Arrays of a cloned voice, or empty.

        Raises:
            MegakernelTTSError: As `TTS.open`; an `EngineClosedError` if the process has ended.
        """
        if not self._free_rings:
            raise EngineBusyError(
                f"{self.slots} streams can speak at once on {self.name}, and {self.num_sessions} "
                "sessions are open, as many as may wait. Try again later."
            )
        number, ring = next(self._numbers), self._free_rings.pop()
        session = RemoteSession(
            number,
            RingReader(self._rings[ring]),
            self._channel.send,
            lambda: self._free_rings.append(ring),
        )
        self._sessions[number] = session
        self._channel.send(Open(number, ring, request, voice))
        try:
            await session.opened
        except asyncio.CancelledError:
            session.cancel()
            raise
        return session

    async def clone(self, recording: bytes, text: str | None) -> Voice:
        """Makes a voice from the content of an audio file.

        Raises:
            MegakernelTTSError: As `TTS.clone`; an `EngineClosedError` if the process has ended.
        """
        number = next(self._numbers)
        voice = self._cloning[number] = asyncio.get_running_loop().create_future()
        self._channel.send(Clone(number, text, recording))
        try:
            return await voice
        finally:
            self._cloning.pop(number, None)

    def close(self) -> None:
        """Ends the process and its sessions; may be called twice."""
        self._channel.close()

    async def wait_closed(self) -> int:
        """Waits until the process has ended; kills it if it does not end with its channel.

        Returns:
            Its exit status, negative for a signal.
        """
        await self._closed.wait()
        try:
            return await asyncio.to_thread(self._process.wait, _EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)

    async def _ping(self) -> None:
        """Ends the process once it hangs."""
        while self._num_missed < _MAX_MISSED_PINGS:
            self._answered = False
            self._channel.send(Ping())
            await asyncio.sleep(_PING_INTERVAL_S)
            self._num_missed = 0 if self._answered else self._num_missed + 1
        fields = {"engine": self.name, "missed_pings": self._num_missed}
        _log.error("an engine process does not answer and is killed", extra={"fields": fields})
        self._process.kill()
        self._channel.abort()  # the kernel may not end the process soon

    def _receive(self, message: Message) -> None:
        """Handles a message of the process."""
        match message:
            case Loaded():
                self._loading.set_result(message)
            case Warm():
                self.warm = True
                self._pinging = asyncio.create_task(self._ping())
                self._on_change()
                _log.info("an engine is warm", extra={"fields": {"engine": self.name}})
            case Pong(frame_step_s=seconds):
                self._answered = True
                self.frame_step_s = seconds
            case Failed(error=error):
                if self._loading.done():
                    fields = {"engine": self.name, "reason": error.message}
                    _log.error("an engine could not be warmed up", extra={"fields": fields})
                else:
                    self._loading.set_exception(error.exception())
            case Opened(session=number):
                opened = self._sessions[number].opened
                if not opened.done():  # the request may have been cancelled
                    opened.set_result(None)
            case Refused(number=number, error=error):
                if number in self._sessions:
                    self._sessions.pop(number).refuse(error.exception())
                else:
                    self._end_cloning(number, error.exception())
            case Cloned(number=number):
                self._end_cloning(number, unpack_voice(message.header, message.body))
            case Chunk(session=number):
                self._sessions[number].receive(message)
            case Finished(session=number):
                self._sessions.pop(number).receive_finish(message.finish())
            case _:
                raise ValueError(f"{message} is no message for the front.")

    def _end_cloning(self, number: int, result: Voice | Exception) -> None:
        voice = self._cloning.pop(number, None)
        if voice is None or voice.done():  # the request was cancelled
            return
        if isinstance(result, Exception):
            voice.set_exception(result)
        else:
            voice.set_result(result)

    def _end(self) -> None:
        """Ends the sessions, because the process has ended or will."""
        self.warm = False
        if self._pinging is not None:
            self._pinging.cancel()
        reason = f"The engine process on {self.name} has ended; try again."
        for session in self._sessions.values():
            if session.opened.done():
                session.fail(reason)
            else:
                session.refuse(EngineClosedError(reason))
        self._sessions.clear()
        for number in [*self._cloning]:
            self._end_cloning(number, EngineClosedError(reason))
        if not self._loading.done():
            self._loading.set_exception(EngineClosedError(reason))
        self._closed.set()
        self._on_change()


def _spawn(
    command: Sequence[str], environment: dict[str, str], num_rings: int
) -> tuple[subprocess.Popen[bytes], socket.socket, list[memoryview]]:
    """Starts an engine process.

    Returns:
        The process, the front's end of its channel, and the rings.
    """
    memory = create_memory(num_rings)
    ours, theirs = socket.socketpair()
    try:
        # Not by asyncio, which loses a process whose creation is cancelled.
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(memory)],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(theirs.fileno(), memory),
        )
        return process, ours, map_rings(memory)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(memory)
