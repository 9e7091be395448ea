"""Several engine processes as one engine."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, BinaryIO, TypeVar

from megakernel_tts import ChunkPolicy, EngineClosedError, ModelInfo, Sampling, Voice
from megakernel_tts.server.cluster.client import EngineClient
from megakernel_tts.server.cluster.messages import Load, SessionRequest, pack_voice
from megakernel_tts.server.cluster.placement import Placement
from megakernel_tts.server.cluster.remote_session import RemoteSession
from megakernel_tts.server.cluster.supervisor import ENGINE_COMMAND, Supervisor
from megakernel_tts.server.engine import TextLayout
from megakernel_tts.server.logs import LogFormat
from megakernel_tts.server.metrics import Counter, Metrics

T = TypeVar("T")


class EngineCluster:
    """A `SpeechEngine` over engine processes, on the event loop that started it.

    A session is opened on the engine with the fewest open ones. When the process of an engine ends,
    its sessions end with an error, and the engine is restarted.
    """

    def __init__(
        self,
        model: str,
        placements: Sequence[Placement],
        slots: int,
        log_format: LogFormat,
        command: Sequence[str],
        cache_positions: int | None = None,
        prefill_positions: int | None = None,
    ) -> None:
        """Starts without a process; `start` calls it."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._closed = False
        self._restarts = Counter("engine_restarts_total", "Engines that were restarted.", "engine")
        self._supervisors = [
            Supervisor(
                command,
                placement.environment,
                Load(
                    placement.name,
                    model,
                    placement.device,
                    slots,
                    log_format,
                    cache_positions=cache_positions,
                    prefill_positions=prefill_positions,
                ),
                on_change=self._changed.set,
                on_restart=lambda name=placement.name: self._restarts.add(name),
            )
            for placement in placements
        ]
        self._table: Mapping[str, str] = {}
        self._encoded_table = "{}"

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        model: str,
        placements: Sequence[Placement],
        slots: int,
        *,
        cache_positions: int | None = None,
        prefill_positions: int | None = None,
        log_format: LogFormat = "text",
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> AsyncGenerator["EngineCluster"]:
        """Starts the processes and waits until all have loaded the model; the block ends them.

        Args:
            model: As in `TTS.load`.
            placements: One for each process.
            slots: Number of streams that can speak at once on each engine.
            cache_positions: As in `TTS.load`, for each engine.
            prefill_positions: As in `TTS.load`.
            log_format: Format of the processes' log.
            command: Runs an engine process.

        Raises:
            MegakernelTTSError: The model cannot be loaded.
            ValueError: A device is invalid, or memory cannot hold the slots.
            OSError: A process cannot be started.
        """
        cluster = cls(
            model, placements, slots, log_format, command, cache_positions, prefill_positions
        )
        try:
            await cluster._start_all()
            yield cluster
        finally:
            cluster.close()
            for supervisor in cluster._supervisors:
                await supervisor.wait_closed()

    async def _start_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for supervisor in self._supervisors:
                    group.create_task(supervisor.start())
        except ExceptionGroup as errors:  # one failure stops the others
            raise errors.exceptions[0] from None
        client = self._supervisors[0].client
        assert client is not None  # was just started
        self._loaded = client.loaded

    @property
    def info(self) -> ModelInfo:
        """Description of the model."""
        return self._loaded.info

    @property
    def sampling(self) -> Sampling:
        """The model's default sampling parameters."""
        return self._loaded.sampling

    @property
    def slots(self) -> int:
        """Number of streams that can speak at once now: those of all warm engines."""
        return sum(client.slots for client in self._warm_clients)

    @property
    def running(self) -> bool:
        """Whether it was not closed: an engine that fails is restarted."""
        return not self._closed

    @property
    def warm(self) -> bool:
        """Whether an engine is warm."""
        return bool(self._warm_clients)

    @property
    def frame_step_s(self) -> float:
        """That of the slowest engine, at its last answer to a ping; see `SpeechEngine`."""
        return max((client.frame_step_s for client in self._warm_clients), default=0.0)

    @property
    def _warm_clients(self) -> list[EngineClient]:
        clients = (supervisor.client for supervisor in self._supervisors)
        return [client for client in clients if client is not None and client.warm]

    async def awarmup(self) -> None:
        """Returns once an engine is warm.

        Raises:
            EngineClosedError: The cluster was closed meanwhile.
        """
        while not self.warm:
            if self._closed:
                raise EngineClosedError("The engines were closed; start them again.")
            self._changed.clear()
            await self._changed.wait()

    async def aopen(
        self,
        voice: str | Voice | None,
        language: str,
        instruct: str | None,
        *,
        layout: TextLayout,
        sampling: Sampling,
        chunks: ChunkPolicy,
        speed: float,
        pronunciations: Mapping[str, str],
        text: str | None,
        priority: int,
    ) -> RemoteSession:
        """Opens a session, as `TTS.open`, on the engine with the fewest open ones.

        Raises:
            MegakernelTTSError: As `TTS.open`; an `EngineClosedError` if no engine is warm.
        """
        # A cloned voice is sent with each request, so that an engine that was restarted has it.
        cloned, arrays = pack_voice(voice) if isinstance(voice, Voice) else (None, b"")
        request = SessionRequest(
            voice=None if isinstance(voice, Voice) else voice,
            cloned=cloned,
            language=language,
            instruct=instruct,
            layout=layout,
            sampling=sampling,
            chunks=chunks,
            speed=speed,
            pronunciations=self._encode_table(pronunciations),
            text=text,
            priority=priority,
        )
        return await self._on_least_loaded(lambda client: client.open(request, arrays))

    def clone(self, wav: BinaryIO, text: str | None) -> Voice:
        """Makes a voice from a recording; see `SpeechEngine`.

        Raises:
            MegakernelTTSError: As `TTS.clone`; an `EngineClosedError` if no engine is warm.
        """
        recording = wav.read()
        cloning = self._on_least_loaded(lambda client: client.clone(recording, text))
        return asyncio.run_coroutine_threadsafe(cloning, self._loop).result()

    async def _on_least_loaded(
        self, request: Callable[[EngineClient], Coroutine[Any, Any, T]]
    ) -> T:
        """Sends a request to the engine with the fewest sessions; to another one if it ends."""
        while clients := self._warm_clients:
            client = min(clients, key=lambda client: client.num_sessions)
            try:
                return await request(client)
            except EngineClosedError:
                if client.warm:
                    raise
        raise EngineClosedError("No engine is ready: all of them are being started. Try again.")

    def _encode_table(self, pronunciations: Mapping[str, str]) -> str:
        """Encodes a table; requests without one of their own share that of the server."""
        if pronunciations is not self._table:
            self._table = pronunciations
            self._encoded_table = json.dumps(dict(pronunciations))
        return self._encoded_table

    def add_metrics(self, metrics: Metrics) -> None:
        """Adds the state of the engines to the metrics of a server."""
        metrics.add_gauge("engines_ready", "Warm engines.", lambda: len(self._warm_clients))
        for supervisor in self._supervisors:
            self._restarts.add(supervisor.name, amount=0)
        metrics.add_counter(self._restarts)

    def close(self) -> None:
        """Ends every session and the processes, without waiting; may be called twice."""
        self._closed = True
        self._changed.set()
        for supervisor in self._supervisors:
            supervisor.close()
