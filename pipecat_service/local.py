"""The service with an engine in the same process."""

import os
from collections.abc import Mapping
from typing import Any

from pipecat.services.settings import TTSSettings
from pipecat.utils.types import is_given

from megakernel_tts import TTS, Voice
from pipecat_service.arguments import check_keywords, check_settings
from pipecat_service.settings import MegakernelTTSSettings, default_settings
from pipecat_service.synthesizer import EngineSynthesizer
from pipecat_service.tts import SynthesizerTTSService


class MegakernelTTSService(SynthesizerTTSService):
    """Text-to-speech in a Pipecat pipeline with an engine in the same process.

    Services may share one engine, which needs a slot for each that speaks at the same time. A
    server loads it before its first caller and passes it to each service (`engine`). A program with
    one conversation may name a `model` instead, which is loaded while the pipeline is set up.
    """

    def __init__(
        self,
        *,
        engine: TTS | None = None,
        model: str | os.PathLike[str] | None = None,
        voices: Mapping[str, Voice] | None = None,
        settings: MegakernelTTSSettings | None = None,
        **kwargs: Any,
    ) -> None:
        """Creates a service. This is cheap; create one for each pipeline.

        Args:
            engine: An engine that is loaded and warmed up; the caller closes it.
            model: Instead of an engine: `demo`, a checkpoint's folder or a hub id, also given as
                `Settings(model=...)`. Services of one event loop that name the same model share its
                engine; the last that is cleaned up closes it. Pipecat waits 20 s for loading:
                `PipelineWorker(setup_timeout_secs=...)`. If the model cannot be loaded or lacks the
                voice, the error is permanent.
            voices: Cloned voices by name, for `Settings.voice` with a Base model.
            settings: Initial settings; the default of each is the model's.
            **kwargs: For `TTSService`, such as `sample_rate` and `text_transforms`.

        Raises:
            TypeError: An argument is unknown or of another type, or the service sets it itself.
            ValueError: Both an engine and a model were given, or neither; two cloned voices have
                the same name; or `text_aggregation_mode` is `TOKEN`.
            ColdEngineError: The engine was not warmed up.
            MegakernelTTSError: A setting is invalid; see `SettingsCheck.complete`.
        """
        check_keywords(kwargs, type(self))
        check_voices(voices or {})
        check_settings(settings, type(self))
        model = choose_model(engine, model, settings)
        synthesizer = EngineSynthesizer(model, voices or {})
        chosen = default_settings(engine.info.name if engine is not None else model)
        if settings is not None:
            chosen.apply_update(settings)
        super().__init__(synthesizer, chosen, **kwargs)
        if engine is not None:
            synthesizer.set_engine(engine, self._settings)


def check_voices(voices: object) -> None:
    """Checks the cloned voices of a service.

    Args:
        voices: Argument of the service.

    Raises:
        TypeError: They are no mapping of names to voices.
        ValueError: Two names differ only in case and surrounding spaces.
    """
    if not isinstance(voices, Mapping):
        raise TypeError(f"voices is {voices!r}; it must be a mapping of names to voices.")
    names = dict[str, str]()
    for name, voice in voices.items():
        if not isinstance(name, str) or not isinstance(voice, Voice):
            raise TypeError(
                f"voices has {name!r} for a name and a {type(voice).__name__} for a voice; they "
                "must be a string and a Voice, which engine.clone makes and Voice.load reads."
            )
        other = names.setdefault(name.strip().lower(), name)
        if other != name:
            raise ValueError(
                f"voices has the names {other!r} and {name!r}, which are the same for a service: "
                "case and surrounding spaces do not count. Rename one."
            )


def choose_model(
    engine: TTS | None, model: str | os.PathLike[str] | None, settings: TTSSettings | None
) -> str | None:
    """The name of the model to load, from the argument or the setting.

    Args:
        engine: Argument of the service.
        model: Argument of the service.
        settings: Argument of the service.

    Returns:
        The name; None if an engine was given.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is not exactly one of engine and model, or two different models.
    """
    if not isinstance(engine, TTS | None):
        raise TypeError(
            f"engine is {engine!r}; it must be a TTS that is loaded and warmed up. To load a model "
            "by name, use model=... instead."
        )
    if not isinstance(model, str | os.PathLike | None):
        raise TypeError(f"model is {model!r}; it must be demo, a folder or a hub id.")
    named = [os.fspath(model)] if model is not None else []
    if settings is not None and is_given(settings.model) and settings.model is not None:
        named.append(settings.model)
    if engine is not None and named == [engine.info.name]:
        named = []  # the setting repeats the engine's model
    if (engine is None) == (not named):
        found = "neither" if engine is None else "both"
        raise ValueError(
            f"A service takes an engine or a model, found {found}: give it engine=..., loaded "
            "and warmed up, or model='demo', a folder or a hub id."
        )
    if len(set(named)) > 1:
        raise ValueError(f"model is {named[0]!r} and Settings.model is {named[1]!r}; name one.")
    return named[0] if named else None
