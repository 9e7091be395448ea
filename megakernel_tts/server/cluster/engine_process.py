"""An engine process: loads a model and serves the sessions of the front.

The front starts it as `python -m megakernel_tts.server.cluster.engine_process CHANNEL MEMORY`, with
the descriptors of a socket and of the rings' memory. It ends when the socket is closed, which the
kernel does when the front ends in any way.
"""

import asyncio
import gc
import io
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import lru_cache

from megakernel_tts import MegakernelTTSError, Pronunciations
from megakernel_tts.server.cluster.audio_ring import RingWriter, map_rings
from megakernel_tts.server.cluster.channel import Channel
from megakernel_tts.server.cluster.messages import (
    Cancel,
    Clone,
    Cloned,
    End,
    ErrorInfo,
    Failed,
    Flush,
    Load,
    Loaded,
    Message,
    Open,
    Ping,
    Pong,
    PushText,
    Refused,
    Release,
    Warm,
    pack_voice,
    unpack_voice,
)
from megakernel_tts.server.cluster.served_stream import ServedStream, describe_error
from megakernel_tts.server.engine import SpeechEngine, SpeechSession
from megakernel_tts.server.event_loop import run_loop
from megakernel_tts.server.failures import FailureLog
from megakernel_tts.server.logs import configure_logging

_log = logging.getLogger("megakernel_tts.server")

_MAX_VOICES = 64  # cloned voices that are kept: as many as the engine caches prefixes
_MAX_TABLES = 64  # of pronunciations

Loader = Callable[[Load], SpeechEngine]


def serve(load: Loader) -> None:
    """Serves the front until it closes the channel; does not return.

    Args:
        load: Loads the engine; called on a thread of its own.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to both processes: the front decides
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # until the engine is warm
    channel, memory = (int(argument) for argument in sys.argv[1:3])
    os.set_inheritable(channel, False)  # of a compiler, which could keep it open
    rings = map_rings(memory)
    os.close(memory)
    run_loop(_serve(socket.socket(fileno=channel), rings, load))


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
        self._cloning: set[asyncio.Task[None]] = set()
        self._streams: dict[int, ServedStream] = {}
        self._failures = FailureLog()
        # The same bytes give the same object, by which the engine caches a voice's prefix.
        self._voice = lru_cache(_MAX_VOICES)(unpack_voice)
        self._pronunciations = lru_cache(_MAX_TABLES)(_parse_pronunciations)

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
            case Ping():
                self.channel.send(Pong(self._engine.frame_step_s if self._engine else 0.0))
            case Clone():
                task = asyncio.create_task(self._clone(message))
                self._cloning.add(task)
                task.add_done_callback(self._cloning.discard)
            case PushText() | Flush() | End() | Cancel() | Release():
                if message.session in self._streams:  # it may have ended meanwhile
                    self._streams[message.session].receive(message)
            case _:
                raise ValueError(f"{message} is no message for an engine process.")

    async def _load_and_warm_up(self, request: Load) -> None:
        _configure_logging(request)
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
            gc.freeze()  # a full collection of torch's objects would stop all streams for 0.1 s
            gc.enable()
            self.channel.send(Warm())

    @property
    def _warm_engine(self) -> SpeechEngine:
        assert self._engine is not None, "the front requests nothing before the engine is warm"
        return self._engine

    async def _clone(self, message: Clone) -> None:
        recording = io.BytesIO(message.body)
        try:
            voice = await asyncio.to_thread(self._warm_engine.clone, recording, message.text)
        except Exception as error:
            self.channel.send(Refused(message.number, describe_error(error)))
        else:
            self.channel.send(Cloned(message.number, *pack_voice(voice)))

    def _open(self, message: Open) -> None:
        request = message.request

        async def open_session() -> SpeechSession:
            voice = request.cloned and self._voice(request.cloned, message.body)
            return await self._warm_engine.aopen(
                voice or request.voice,
                request.language,
                request.instruct,
                layout=request.layout,
                sampling=request.sampling,
                chunks=request.chunks,
                speed=request.speed,
                pronunciations=self._pronunciations(request.pronunciations),
                text=request.text,
                priority=request.priority,
            )

        writer = RingWriter(self._rings[message.ring])
        stream = ServedStream(message.session, open_session, writer, self.channel, self._failures)
        self._streams[message.session] = stream
        stream.task.add_done_callback(lambda _: self._remove(message.session))

    def _remove(self, session: int) -> None:
        del self._streams[session]
        if not self._warm_engine.running:  # it has failed, which its streams have noticed
            _log.error("The engine has failed; its process ends.")
            self.channel.close()


def _configure_logging(request: Load) -> None:
    """Has the log name the engine in each record."""
    logging.basicConfig(level=logging.WARNING)
    configure_logging(request.log_format)

    def add_engine(record: logging.LogRecord) -> bool:
        record.fields = {"engine": request.name, **getattr(record, "fields", {})}
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(add_engine)


def _parse_pronunciations(table: str) -> Pronunciations:
    return Pronunciations(json.loads(table))


def _load_tts(request: Load) -> SpeechEngine:
    from megakernel_tts import TTS

    return TTS.load(
        request.model,
        request.device,
        slots=request.slots,
        cache_positions=request.cache_positions,
        prefill_positions=request.prefill_positions,
    )


if __name__ == "__main__":
    serve(_load_tts)
