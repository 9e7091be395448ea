"""One engine for all services of an event loop that name the same model."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import ClassVar
from weakref import WeakValueDictionary

from loguru import logger

from megakernel_tts import TTS

Key = tuple[asyncio.AbstractEventLoop, str]  # of whom, and the model's name


class _Shared:
    """A model from the first of its users to the last.

    The table does not keep it: it goes with those who use it, even if they never say so.

    Attributes:
        users: How many there are.
        loading: Its engine, sooner or later.
    """

    table: ClassVar[WeakValueDictionary[Key, "_Shared"]] = WeakValueDictionary()

    def __init__(self, key: Key) -> None:
        self.users = 0
        loop, model = self._key = key
        self.table[key] = self
        self._engine: TTS | None = None
        self.loading = loop.run_in_executor(None, _load, model)
        self.loading.add_done_callback(self._loaded)

    @classmethod
    def find(cls, model: str) -> "_Shared":
        """That of the running event loop; begins to load if there is none."""
        key = asyncio.get_running_loop(), model
        return cls.table.get(key) or cls(key)

    def _loaded(self, loading: asyncio.Future[TTS]) -> None:
        """Looks whether anybody still waits. Those who come after a failure try again."""
        if loading.exception() is not None:
            del self.table[self._key]
            return
        self._engine = loading.result()
        self._close_if_unused()

    def leave(self) -> None:
        """One user less. What nobody waits for is loaded all the same: a thread cannot be stopped.

        Who names the model until then finds it half loaded, and not for a second time.
        """
        self.users -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        """On a thread, since an engine that is closed finishes its frame.

        Not in the event loop's executor, which takes no more work once the loop ends; so the loop
        may be over before the engine's memory is free. The process waits for it.
        """
        if self._engine is not None and not self.users:
            del self.table[self._key]
            threading.Thread(target=self._engine.close, name="megakernel-tts-close").start()


def _load(model: str) -> TTS:
    logger.info(f"Loading and warming up {model}")
    start = time.monotonic()
    engine = TTS.load(model)
    try:
        engine.warmup()
    except BaseException:
        engine.close()
        raise
    logger.info(f"{model} is ready after {time.monotonic() - start:.1f} s")
    return engine


@asynccontextmanager
async def shared_engine(model: str | os.PathLike[str]) -> AsyncGenerator[TTS]:
    """The engine of a model: loaded and warmed up for the first user, closed after the last.

    The event loop goes on meanwhile. Users that come while it is loaded wait for the same engine.

    Args:
        model: `demo`, a checkpoint's folder or a hub id.

    Yields:
        The engine, warm.

    Raises:
        CheckpointError: The model is missing or broken.
        ValueError: Its memory is not there.
    """
    shared = _Shared.find(os.fspath(model))
    shared.users += 1
    try:
        # Shielded: who does not want to wait any longer does not decide for the others.
        yield await asyncio.shield(shared.loading)
    finally:
        shared.leave()
