"""The front's side of one engine process: starts it, and opens sessions on it."""

import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from itertools import count

from megakernel_tts import ChunkPolicy, EngineBusyError, EngineClosedError, Sampling, Voice
from megakernel_tts.server.cluster.audio_ring import RingReader, create_memory, map_rings
from megakernel_tts.server.cluster.channel import Channel
from megakernel_tts.server.cluster.messages import (
    Chunk,
    Failed,
    Finished,
    Load,
    Loaded,
    Message,
    Open,
    Opened,
    Refused,
    Warm,
    pack_voice,
)
from megakernel_tts.server.cluster.remote_session import RemoteSession

_log = logging.getLogger("megakernel_tts.server")

_MAX_WAITING = 64  # sessions beyond the engine's slots: as many as an engine accepts
_EXIT_TIMEOUT_S = 5.0  # from the end of the channel to that of the process


class EngineClient:
    """One engine process. All methods are called on the event loop that started it.

    Attributes:
        name: Of its GPU, for logs.
        loaded: The model.
        warm: Whether sessions can be opened: the engine is warm, and the process has not ended.
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
        self._process = process
        self._rings = rings
        self._on_change = on_change
        self._free_rings = [*reversed(range(len(rings)))]
        self._sessions: dict[int, RemoteSession] = {}
        self._numbers = count()
        self._loading: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
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
            process.wait()  # a matter of milliseconds
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

    async def open(
        self,
        voice: str | Voice | None,
        language: str,
        instruct: str | None,
        *,
        sampling: Sampling,
        chunks: ChunkPolicy,
        text: str | None,
    ) -> RemoteSession:
        """Opens a session; the arguments and errors are those of `TTS.open`."""
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
        # A cloned voice travels with each request, so that an engine that was restarted has it.
        cloned, body = pack_voice(voice) if isinstance(voice, Voice) else (None, b"")
        name = None if isinstance(voice, Voice) else voice
        request = Open(
            session=number,
            ring=ring,
            voice=name,
            cloned=cloned,
            language=language,
            instruct=instruct,
            sampling=sampling,
            chunks=chunks,
            text=text,
            body=body,
        )
        self._channel.send(request)
        try:
            await session.opened
        except asyncio.CancelledError:
            session.cancel()
            raise
        return session

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

    def _receive(self, message: Message) -> None:
        """Handles a message of the process."""
        match message:
            case Loaded():
                self._loading.set_result(message)
            case Warm():
                self.warm = True
                self._on_change()
            case Failed(error=error):
                if self._loading.done():
                    _log.error("%s: the engine cannot be warmed up: %s", self.name, error.message)
                else:
                    self._loading.set_exception(error.exception())
            case Opened(session=number):
                opened = self._sessions[number].opened
                if not opened.done():  # the request may have been cancelled
                    opened.set_result(None)
            case Refused(session=number, error=error):
                self._sessions.pop(number).refuse(error.exception())
            case Chunk(session=number):
                self._sessions[number].receive(message)
            case Finished(session=number):
                self._sessions.pop(number).receive_finish(message.finish())
            case _:
                raise ValueError(f"{message} is no message for the front.")

    def _end(self) -> None:
        """Ends the sessions, because the process has ended or will."""
        self.warm = False
        reason = f"The engine process on {self.name} has ended; try again."
        for session in self._sessions.values():
            if session.opened.done():
                session.fail(reason)
            else:
                session.refuse(EngineClosedError(reason))
        self._sessions.clear()
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
