"""Engines that are shared by the services of an event loop that name the same model."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from loguru import logger


class Engine(Protocol):
    """What is shared: a `TTS` or an `STT`."""

    def warmup(self) -> None:
        """Makes the first request as fast as others."""

    def close(self) -> None:
        """Stops the engine."""


E = TypeVar("E", bound=Engine)
Load = Callable[[str], E]  # `TTS.load` or `STT.load`
Key = tuple[asyncio.AbstractEventLoop, Load[Any], str]  # the last is the model's name


class _SharedModel(Generic[E]):
    """A model that is loaded for its first user and closed after its last.

    The table `models` holds weak references: an entry ends with its users, even if they do not
    release it.

    Attributes:
        num_users: Users of the model, those waiting for it included.
        loading: Gives the engine.
    """

    models: ClassVar[WeakValueDictionary[Key, "_SharedModel[Any]"]] = WeakValueDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop, load: Load[E], model: str) -> None:
        self.num_users = 0
        self._key = loop, load, model
        self.models[self._key] = self
        self._engine: E | None = None
        self.loading: asyncio.Future[E] = loop.run_in_executor(None, _load, load, model)
        self.loading.add_done_callback(self._loaded)

    @classmethod
    def find(cls, load: Load[E], model: str) -> "_SharedModel[E]":
        """Finds the model of the running event loop; starts to load it if there is none."""
        key = asyncio.get_running_loop(), load, model
        return cls.models.get(key) or _SharedModel(*key)

    def _loaded(self, loading: asyncio.Future[E]) -> None:
        """Closes the engine if it has no users. After a failure, the next user loads again."""
        if loading.exception() is not None:
            del self.models[self._key]
            return
        self._engine = loading.result()
        self._close_if_unused()

    def release(self) -> None:
        """Ends the use by one user.

        Loading continues without users, because a thread cannot be stopped; a user that names the
        model until then shares the load that is under way.
        """
        self.num_users -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Closes the engine on a thread, since closing waits for the codec frame under way.

        The event loop's executor accepts no work once the loop ends. The thread may outlive the
        loop; the process waits for it.
        """
        if self._engine is not None and not self.num_users:
            del self.models[self._key]
            threading.Thread(target=self._engine.close, name="megakernel-tts-close").start()


def _load(load: Load[E], model: str) -> E:
    logger.info(f"Loading and warming up {model}")
    start = time.monotonic()
    engine = load(model)
    try:
        engine.warmup()
    except BaseException:
        engine.close()
        raise
    logger.info(f"{model} is ready after {time.monotonic() - start:.1f} s")
    return engine


@asynccontextmanager
async def shared_engine(load: Load[E], model: str | os.PathLike[str]) -> AsyncGenerator[E]:
    """Gives the engine of a model: loaded and warmed up for the first user, closed after the last.

    Loading does not block the event loop. Users that arrive while a model is being loaded share it.

    Args:
        load: `TTS.load` or `STT.load`.
        model: As for `load`.

    Yields:
        The engine, warmed up.

    Raises:
        CheckpointError: The model is missing or broken.
        ValueError: The device has too little memory.
    """
    shared = _SharedModel.find(load, os.fspath(model))
    shared.num_users += 1
    try:
        # Shielded, so that cancelling one user does not cancel loading for the others.
        yield await asyncio.shield(shared.loading)
    finally:
        shared.release()
