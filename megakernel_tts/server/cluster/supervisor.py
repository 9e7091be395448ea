"""Keeps one engine process running: starts it, and starts it again when it ends."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from megakernel_tts.server.cluster.client import EngineClient
from megakernel_tts.server.cluster.messages import Load

_log = logging.getLogger("megakernel_tts.server")

ENGINE_COMMAND = (sys.executable, "-m", "megakernel_tts.server.cluster.engine_process")

_FIRST_DELAY_S, _MAX_DELAY_S = 0.25, 30.0  # before a restart; doubled for each failure in a row
_STABLE_S = 60.0  # an engine that ran for so long before it failed has not failed in a row


def restart_delay_s(num_failures: int) -> float:
    """Returns the seconds from the end of a process to its restart.

    Args:
        num_failures: Failures in a row, from 1.
    """
    return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(num_failures - 1, 16))


class Supervisor:
    """Supervises one engine process.

    Attributes:
        name: Of the engine.
        client: The process; None while no model is loaded.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        request: Load,
        *,
        on_change: Callable[[], None],
        on_restart: Callable[[], None],
    ) -> None:
        """Starts without a process.

        Args:
            command: Runs `engine_process`.
            environment: Variables in addition to those of this process.
            request: What the process loads.
            on_change: Called when the engine becomes warm, and when its process ends.
            on_restart: Called before the process is started again.
        """
        self.name = request.name
        self.client: EngineClient | None = None
        self._command = command
        self._environment = {**os.environ, **environment}
        self._request = request
        self._on_change = on_change
        self._on_restart = on_restart
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the process, waits until the model is loaded, and supervises it from then on.

        Raises:
            MegakernelTTSError: The model cannot be loaded.
            ValueError: The device is invalid, or memory cannot hold the slots.
            OSError: The process cannot be started.
        """
        self.client = await self._load()
        self._task = asyncio.create_task(self._supervise())

    def close(self) -> None:
        """Ends the process without waiting, and does not restart it."""
        if self._task is not None:
            self._task.cancel()
        if self.client is not None:
            self.client.close()

    async def wait_closed(self) -> None:
        """Returns when the process has ended."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if self.client is not None:
            await self.client.wait_closed()

    async def _load(self) -> EngineClient:
        return await EngineClient.start(
            self._command, self._environment, self._request, self._on_change
        )

    async def _supervise(self) -> None:
        loop, num_failures = asyncio.get_running_loop(), 0
        while True:
            start_s = loop.time()
            reason = await self._run()
            if loop.time() - start_s > _STABLE_S:
                num_failures = 0
            num_failures += 1
            delay_s = restart_delay_s(num_failures)
            fields = {"engine": self.name, "reason": reason, "restart_s": delay_s}
            _log.error("an engine process has ended", extra={"fields": fields})
            await asyncio.sleep(delay_s)
            self._on_restart()

    async def _run(self) -> str:
        """Loads the model, if that was not done, and returns why the process has ended."""
        try:
            self.client = self.client or await self._load()
        except Exception as error:  # of any kind: supervision must not end
            return str(error) or type(error).__name__
        status = await self.client.wait_closed()
        self.client = None
        return f"signal {-status}" if status < 0 else f"exit status {status}"
