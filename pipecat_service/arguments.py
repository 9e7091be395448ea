"""Checks of the services' arguments, so that a mistake is found when the service is created."""

import inspect
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pipecat.services.ai_service import AIService
from pipecat.services.settings import ServiceSettings
from pipecat.services.tts_service import TextAggregationMode
from pipecat.utils.types import is_given

_FIXED = frozenset(
    {
        "aggregate_sentences",
        "append_trailing_space",
        "keepalive_interval",
        "keepalive_timeout",
        "pause_watchdog_timeout_s",
        "push_start_frame",
        "push_stop_frames",
        "push_text_frames",
        "reuse_context_id_within_turn",
        "stop_frame_timeout_s",
    }
)


def check_keywords(
    keywords: Mapping[str, Any], service: type[AIService], settings: type[ServiceSettings]
) -> None:
    """Checks the arguments that are meant for Pipecat's class, which ignores unknown ones.

    Args:
        keywords: The arguments by name.
        service: The service.
        settings: Its settings.

    Raises:
        TypeError: An argument is unknown, is a setting, or has a fixed value in this service.
        ValueError: `text_aggregation_mode` is `TOKEN`.
    """
    known = {
        name
        for base in service.__mro__
        if not base.__module__.startswith("pipecat_service.")
        for name, parameter in inspect.signature(base.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    names = {field.name for field in fields(settings)}
    for name in keywords:
        if name in _FIXED:
            raise TypeError(f"{name} cannot be set: the service sets it. Leave the argument out.")
        if name in names:
            raise TypeError(
                f"{name} is a setting: settings={service.__name__}.Settings({name}=...)."
            )
        if name not in known:
            raise TypeError(f"{service.__name__} has no argument {name}.")
    if keywords.get("text_aggregation_mode") == TextAggregationMode.TOKEN:
        raise ValueError(
            "text_aggregation_mode=TOKEN is not supported: after an interruption, Pipecat would "
            "drop the spoken words of the current sentence. Leave the argument out; text is "
            "passed to the engine in groups of a few words while it is written."
        )


def check_settings(settings: object, service: type[AIService], kind: type[ServiceSettings]) -> None:
    """Checks the type of initial settings.

    Args:
        settings: Argument of the service.
        service: The service.
        kind: `TTSSettings` or `STTSettings`.

    Raises:
        TypeError: They are no such settings.
    """
    if settings is not None and not isinstance(settings, kind):
        raise TypeError(f"settings is {settings!r}; it must be a {service.__name__}.Settings.")


def choose_model(
    engine_name: str | None, model: str | os.PathLike[str] | None, settings: ServiceSettings | None
) -> str | None:
    """The name of the model to load, from the argument or the setting.

    Args:
        engine_name: Name of the model of the service's engine; None without an engine.
        model: Argument of the service.
        settings: Argument of the service.

    Returns:
        The name; None if an engine was given.

    Raises:
        TypeError: `model` is of another type.
        ValueError: There is not exactly one of engine and model, or two different models.
    """
    if not isinstance(model, str | os.PathLike | None):
        raise TypeError(f"model is {model!r}; it must be demo, a folder or a hub id.")
    named = [os.fspath(model)] if model is not None else []
    if settings is not None and is_given(settings.model) and settings.model is not None:
        named.append(settings.model)
    if engine_name is not None and named == [engine_name]:
        named = []  # the setting repeats the engine's model
    if (engine_name is None) == (not named):
        found = "neither" if engine_name is None else "both"
        raise ValueError(
            f"A service takes an engine or a model, found {found}: give it engine=..., loaded "
            "and warmed up, or model='demo', a folder or a hub id."
        )
    if len(set(named)) > 1:
        raise ValueError(f"model is {named[0]!r} and Settings.model is {named[1]!r}; name one.")
    return named[0] if named else None


def check_engine(engine: object, kind: type) -> None:
    """Checks the type of a service's engine.

    Args:
        engine: Argument of the service.
        kind: The class of engines that it takes.

    Raises:
        TypeError: It is no such engine.
    """
    if engine is not None and not isinstance(engine, kind):
        raise TypeError(
            f"engine is {engine!r}; it must be a {kind.__name__} that is loaded and warmed up. To "
            "load a model by name, use model=... instead."
        )
