"""The service with an engine in the same process."""

import os
from collections.abc import Mapping
from typing import Any

from pipecat.services.settings import TTSSettings

from megakernel_tts import TTS, Voice
from pipecat_service.arguments import check_engine, check_keywords, check_settings, choose_model
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
        """Creates a service, in little time; create one for each pipeline.

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
        check_keywords(kwargs, type(self), self.Settings)
        check_voices(voices or {})
        check_settings(settings, type(self), TTSSettings)
        check_engine(engine, TTS)
        name = engine.info.name if engine is not None else None
        model = choose_model(name, model, settings)
        synthesizer = EngineSynthesizer(model, voices or {})
        chosen = default_settings(name or model)
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
