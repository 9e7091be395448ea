"""Checks of the service's arguments, so that a mistake is found when the service is created."""

import inspect
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TextAggregationMode, TTSService
from pipecat.utils.types import is_given

from megakernel_tts import TTS, Voice
from pipecat_service.settings import MegakernelTTSSettings

_FIXED = frozenset(
    {
        "aggregate_sentences",
        "append_trailing_space",
        "pause_watchdog_timeout_s",
        "push_start_frame",
        "push_stop_frames",
        "push_text_frames",
        "reuse_context_id_within_turn",
        "stop_frame_timeout_s",
    }
)


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Checks the arguments that are meant for `TTSService`; it ignores those that it does not have.

    Args:
        keywords: The arguments by name.

    Raises:
        TypeError: An argument is unknown, is a setting, or has a fixed value in this service.
        ValueError: `text_aggregation_mode` is `TOKEN`.
    """
    known = {
        name
        for base in TTSService.__mro__
        for name, parameter in inspect.signature(base.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    settings = {field.name for field in fields(MegakernelTTSSettings)}
    for name in keywords:
        if name in _FIXED:
            raise TypeError(f"{name} cannot be set: the service sets it. Leave the argument out.")
        if name in settings:
            raise TypeError(
                f"{name} is a setting: settings=MegakernelTTSService.Settings({name}=...)."
            )
        if name not in known:
            raise TypeError(f"MegakernelTTSService has no argument {name}.")
    if keywords.get("text_aggregation_mode") == TextAggregationMode.TOKEN:
        raise ValueError(
            "text_aggregation_mode=TOKEN is not supported: after an interruption, Pipecat would "
            "drop the spoken words of the current sentence. Leave the argument out; text is "
            "passed to the engine in groups of a few words while it is written."
        )


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
    if not isinstance(settings, TTSSettings | None):
        raise TypeError(f"settings is {settings!r}; it must be a MegakernelTTSService.Settings.")
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
