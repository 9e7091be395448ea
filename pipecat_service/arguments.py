"""Checks of the service's arguments, so that a mistake is found when the service is created."""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TextAggregationMode, TTSService

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


def check_keywords(keywords: Mapping[str, Any], service: type[TTSService]) -> None:
    """Checks the arguments that are meant for `TTSService`; it ignores those that it does not have.

    Args:
        keywords: The arguments by name.
        service: The service.

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


def check_settings(settings: object, service: type[TTSService]) -> None:
    """Checks the type of initial settings.

    Args:
        settings: Argument of the service.
        service: The service.

    Raises:
        TypeError: They are no settings.
    """
    if not isinstance(settings, TTSSettings | None):
        raise TypeError(f"settings is {settings!r}; it must be a {service.__name__}.Settings.")
