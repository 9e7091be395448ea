"""What a service speaks with: an engine, given or loaded by name, and the voices cloned for it."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

from pipecat.utils.types import assert_given

from megakernel_tts import TTS, ChunkPolicy, EngineClosedError, Session, Voice
from pipecat_service.errors import ColdEngineError
from pipecat_service.loading import shared_engine
from pipecat_service.settings import MegakernelTTSSettings, check_voice, known_voices


class Synthesizer:
    """Opens sessions of an engine, as settings say.

    Attributes:
        cloned: Voices by the names, in lower case, that `MegakernelTTSSettings.voice` may take.
    """

    def __init__(self, model: str | os.PathLike[str] | None, cloned: Mapping[str, Voice]) -> None:
        """Has no engine yet.

        Args:
            model: What `load` is to load; None: an engine will be given to `adopt`.
            cloned: Voices by name.
        """
        self.cloned = {name.strip().lower(): voice for name, voice in cloned.items()}
        self._model = model
        self._engine: TTS | None = None
        self._shared = AsyncExitStack()  # holds the engine of a model that was named

    def adopt(self, engine: TTS, settings: MegakernelTTSSettings) -> None:
        """Takes an engine that can speak as the settings say.

        Args:
            engine: Warmed up; it stays its owner's to close.
            settings: Given the first voice there is, if they name none.

        Raises:
            ColdEngineError: It was not warmed up.
            VoiceError: Its model has no such voice, or its voice was not described.
        """
        if not engine.warm:
            raise ColdEngineError(
                "The engine is cold, and the first caller would wait for it to load and warm up: "
                "call `await engine.awarmup()` once, before any pipeline starts."
            )
        if settings.voice is None:
            settings.voice = next(iter(known_voices(engine.info, self.cloned)), None)
        voice, instruct = assert_given(settings.voice), assert_given(settings.instruct)
        check_voice(voice, instruct, engine.info, self.cloned)
        self._engine = engine

    async def load(self, settings: MegakernelTTSSettings) -> None:
        """Loads and warms up the model on a thread, if one was named; then as `adopt`.

        Raises:
            CheckpointError: The model is missing or broken.
            VoiceError: It has no such voice, or its voice was not described.
        """
        if self._model is not None:
            self.adopt(await self._shared.enter_async_context(shared_engine(self._model)), settings)

    @property
    def aligned(self) -> bool:
        """Whether words' times come from the model's attention; not before it is loaded."""
        return self._engine is not None and self._engine.aligned

    async def open(self, settings: MegakernelTTSSettings, chunks: ChunkPolicy) -> Session:
        """Opens a session for text that is still being written.

        A cloned voice is prepared on first use, so that goes on another thread; if an interruption
        cancels it, the session is dropped, which cancels that, too.

        Args:
            settings: How to speak.
            chunks: How many frames leave together.

        Raises:
            EngineClosedError: No model was loaded, or the engine was closed.
            EngineBusyError: Too many streams wait already.
            VoiceError: The model has no such voice or language, or takes no instruction.
        """
        engine = self._engine
        if engine is None:
            raise EngineClosedError("The model was not loaded when the pipeline was set up.")
        name = assert_given(settings.voice)
        voice = self.cloned.get(name.strip().lower(), name) if name is not None else None
        begin = partial(
            engine.open,
            voice,
            str(assert_given(settings.language) or "auto"),
            assert_given(settings.instruct),
            "streaming",
            assert_given(settings.sampling),
            chunks,
        )
        return await asyncio.to_thread(begin) if isinstance(voice, Voice) else begin()

    async def close(self) -> None:
        """Lets go of the engine, which is closed if it was loaded here and has no other user."""
        await self._shared.aclose()
