"""An engine process: loads a model and serves the sessions of the front.

The front starts it as `python -m megakernel_tts.server.cluster.engine_process CHANNEL MEMORY`, with
the descriptors of a socket and of the rings' memory. It ends when the socket is closed, which the
kernel does when the front ends in any way.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import lru_cache

from megakernel_tts import MegakernelTTSError
from megakernel_tts.server.cluster.audio_ring import RingWriter, map_rings
from megakernel_tts.server.cluster.channel import Channel
from megakernel_tts.server.cluster.messages import (
    Cancel,
    End,
    ErrorInfo,
    Failed,
    Flush,
    Load,
    Loaded,
    Message,
    Open,
    PushText,
    Release,
    Warm,
    unpack_voice,
)
from megakernel_tts.server.cluster.served_stream import ServedStream
from megakernel_tts.server.engine import SpeechEngine, SpeechSession

_log = logging.getLogger("megakernel_tts.server")

_MAX_VOICES = 64  # cloned voices that are kept: as many as the engine caches prefixes

Loader = Callable[[Load], SpeechEngine]


def serve(load: Loader) -> None:
    """Serves the front until it closes the channel; does not return.

    Args:
        load: Loads the engine; called on a thread of its own.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to both processes: the front decides
        signal.signal(number, signal.SIG_IGN)
    channel, memory = (int(argument) for argument in sys.argv[1:3])
    os.set_inheritable(channel, False)  # of a compiler, which could keep it open
    rings = map_rings(memory)
    os.close(memory)
    asyncio.run(_serve(socket.socket(fileno=channel), rings, load))


async def _serve(end: socket.socket, rings: list[memoryview], load: Loader) -> None:
    closed = asyncio.Event()
    process = EngineProcess(rings, load, closed.set)
    await process.channel.connect(end)
    await closed.wait()
    # An orderly exit would wait for a model that is being loaded, or for a launch that hangs, and
    # nothing is left to be saved.
    os._exit(0)


class EngineProcess:
    """The engine of this process and its streams.

    Attributes:
        channel: To the front; not connected at first.
    """

    def __init__(
        self, rings: list[memoryview], load: Loader, on_closed: Callable[[], None]
    ) -> None:
        """Starts without an engine.

        Args:
            rings: Memory of the rings.
            load: Loads the engine.
            on_closed: Called when the channel was closed.
        """
        self.channel = Channel(self._receive, on_closed)
        self._rings = rings
        self._load = load
        self._engine: SpeechEngine | None = None
        self._loading: asyncio.Task[None] | None = None
        self._streams: dict[int, ServedStream] = {}
        # The same bytes give the same object, by which the engine caches a voice's prefix.
        self._voice = lru_cache(_MAX_VOICES)(unpack_voice)

    def _receive(self, message: Message) -> None:
        """Handles a message of the front.

        Raises:
            ValueError: It is no message for an engine process.
        """
        match message:
            case Load():
                self._loading = asyncio.create_task(self._load_and_warm_up(message))
            case Open():
                self._open(message)
            case PushText() | Flush() | End() | Cancel() | Release():
                if message.session in self._streams:  # it may have ended meanwhile
                    self._streams[message.session].receive(message)
            case _:
                raise ValueError(f"{message} is no message for an engine process.")

    async def _load_and_warm_up(self, request: Load) -> None:
        logging.basicConfig(level=logging.WARNING, format=f"{request.name}: %(message)s")
        try:
            engine = self._engine = await asyncio.to_thread(self._load, request)
            self.channel.send(Loaded(engine.info, engine.sampling, engine.slots))
            await engine.awarmup()
        except Exception as error:
            if not isinstance(error, MegakernelTTSError | ValueError):
                _log.exception("The engine could not be started.")
            self.channel.send(Failed(ErrorInfo.of(error)))
            self.channel.close()
        else:
            self.channel.send(Warm())

    def _open(self, request: Open) -> None:
        engine = self._engine
        assert engine is not None, "the front opens no session before the engine is warm"

        async def open_session() -> SpeechSession:
            voice = request.cloned and self._voice(request.cloned, request.body)
            return await engine.aopen(
                voice or request.voice,
                request.language,
                request.instruct,
                sampling=request.sampling,
                chunks=request.chunks,
                text=request.text,
            )

        writer = RingWriter(self._rings[request.ring])
        stream = ServedStream(request.session, open_session, writer, self.channel)
        self._streams[request.session] = stream
        stream.task.add_done_callback(lambda _: self._remove(request.session, engine))

    def _remove(self, session: int, engine: SpeechEngine) -> None:
        del self._streams[session]
        if not engine.running:  # it has failed, which its streams have noticed
            _log.error("The engine has failed; its process ends.")
            self.channel.close()


def _load_tts(request: Load) -> SpeechEngine:
    from megakernel_tts import TTS

    return TTS.load(request.model, request.device, slots=request.slots)


if __name__ == "__main__":
    serve(_load_tts)
