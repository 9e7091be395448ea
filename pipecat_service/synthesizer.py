"""Sessions of an engine in this process, given or loaded by name, and its cloned voices."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

from pipecat.utils.types import assert_given

from megakernel_tts import TTS, EngineClosedError, LivePolicy, Session, Voice
from pipecat_service.errors import check_warm
from pipecat_service.loading import shared_engine
from pipecat_service.settings import MegakernelTTSSettings, SettingsCheck

_LIVE = LivePolicy()


class EngineSynthesizer:
    """Opens sessions of an engine; see `Synthesizer`."""

    def __init__(self, model: str | os.PathLike[str] | None, cloned: Mapping[str, Voice]) -> None:
        """Creates a synthesizer without an engine.

        Args:
            model: Model that `load` loads; None if `set_engine` will be given an engine.
            cloned: Cloned voices by name.
        """
        self._check: SettingsCheck | None = None  # until the model is loaded
        self._cloned = cloned
        self._model = model
        self._engine: TTS | None = None
        self._shared = AsyncExitStack()  # holds the engine of `model`

    def set_engine(self, engine: TTS, settings: MegakernelTTSSettings) -> None:
        """Sets the engine; the settings must suit its model.

        Args:
            engine: An engine that is warmed up; its owner closes it.
            settings: See `SettingsCheck.complete`.

        Raises:
            ColdEngineError: The engine was not warmed up.
            MegakernelTTSError: A setting is invalid; see `SettingsCheck.complete`.
        """
        check_warm(engine.warm)
        check = SettingsCheck(engine.info, self._cloned, engine.check_voice)
        check.complete(settings)
        self._check = check
        self._engine = engine

    async def load(self, settings: MegakernelTTSSettings) -> None:
        """Loads and warms up the model on a thread, if one was named, and sets its engine.

        Args:
            settings: As for `set_engine`.

        Raises:
            CheckpointError: The model is missing or broken.
            MegakernelTTSError: As for `set_engine`.
        """
        if self._model is not None:
            shared = shared_engine(TTS.load, self._model)
            self.set_engine(await self._shared.enter_async_context(shared), settings)

    @property
    def aligned(self) -> bool:
        """Whether word times come from the model's attention; False until the model is loaded."""
        return self._engine is not None and self._engine.aligned

    async def settings_check(self) -> SettingsCheck | None:
        """See `Synthesizer`."""
        return self._check

    async def open(self, settings: MegakernelTTSSettings) -> Session:
        """Opens a session for text that is still being written.

        A cloned voice is prepared at its first use, on another thread. An interruption that cancels
        the call drops the session, which cancels the session as well.

        Args:
            settings: How to speak.

        Returns:
            The session.

        Raises:
            EngineClosedError: No model was loaded, or the engine was closed.
            EngineBusyError: Too many sessions are waiting.
            VoiceError: A cloned voice was changed after its check.
        """
        engine, check = self._engine, self._check
        if engine is None or check is None:
            raise EngineClosedError("The model was not loaded when the pipeline was set up.")
        voice = check.voice(settings)
        open_session = partial(
            engine.open,
            voice,
            str(assert_given(settings.language) or "auto"),
            assert_given(settings.instruct),
            "streaming",
            assert_given(settings.sampling),
            _LIVE.chunks,
            speed=assert_given(settings.speed) or 1.0,
            pronunciations=assert_given(settings.pronunciations),
        )
        return await asyncio.to_thread(open_session) if isinstance(voice, Voice) else open_session()

    async def close(self) -> None:
        """Releases the engine, which is closed if it was loaded by name and has no other user."""
        await self._shared.aclose()
