"""Fields of a JSON request that several protocols share; unknown fields are ignored."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from megakernel_tts import (
    MegakernelTTSError,
    Pronunciations,
    Sampling,
    SamplingError,
    check_speed,
)
from megakernel_tts.server.errors import RequestError, request_error
from megakernel_tts.server.keys import Priority

MAX_TEXT_CHARACTERS = 1 << 16  # of a request, or of a context: about 70 minutes of speech

_MAX_PRONUNCIATIONS = 1000  # of a request; checking more of them would delay other requests
_NO_PRONUNCIATIONS = Pronunciations()

T = TypeVar("T")

# Field of vLLM-Omni, SGLang-Omni and Nari -> field of `Sampling`.
_SAMPLING = {
    "seed": "seed",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "subtalker_temperature": "predictor_temperature",
    "subtalker_top_k": "predictor_top_k",
    "subtalker_top_p": "predictor_top_p",
    "max_new_tokens": "max_frames",
    "guard": "guard",
}
_GREEDY = {"do_sample": "temperature", "subtalker_dosample": "predictor_temperature"}


def parse_object(data: str | bytes) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        RequestError: It is no JSON object.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"The request is not valid JSON ({error}).", 400, "invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise RequestError("The request must be a JSON object.", 400, "invalid_json")
    return value


def get_field(fields: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """Gives a field; the default if it is missing or null.

    Raises:
        RequestError: It has another type.
    """
    value = fields.get(name)
    if value is None:
        return default
    if kind is float and type(value) is int and abs(value) < _MAX_NUMBER:
        return kind(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(
            f"{name} is {str(value)[:100]!r}; it must be {_JSON_TYPES[kind]}.", parameter=name
        )
    return value


_MAX_NUMBER = 1 << 1000  # a larger whole number is no float
_JSON_TYPES: dict[type, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "a boolean",
    dict: "an object",
    list: "an array",
}


def text_field(fields: Mapping[str, Any], name: str) -> str:
    """The text in a field.

    Raises:
        RequestError: It is no string, or too long.
    """
    text = fields.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{name} must be a string: the text to speak.", parameter=name)
    if len(text) > MAX_TEXT_CHARACTERS:
        raise RequestError(
            f"{name} has {len(text):,} characters; at most {MAX_TEXT_CHARACTERS:,} are allowed.",
            400,
            "string_above_max_length",
            name,
        )
    return text


def voice_name(value: object) -> str | None:
    """The name in a field `voice`: a string, or an object with `id`.

    Raises:
        RequestError: It is neither.
    """
    if isinstance(value, dict):
        value = value.get("id")
        if value is None:
            raise RequestError("voice must be a name, or an object with an id.", parameter="voice")
    if not isinstance(value, str | None):
        raise RequestError("voice must be a name, or an object with an id.", parameter="voice")
    return value


def priority_of(fields: Mapping[str, Any]) -> Priority | None:
    """The class in a field `priority`: `live`, `prefetch` or `batch`; None if it is missing.

    Raises:
        RequestError: There is no such class.
    """
    if fields.get("priority") is None:
        return None
    try:
        return Priority.parse(fields["priority"])
    except ValueError as error:
        raise RequestError(str(error), parameter="priority") from None


def sampling_of(fields: Mapping[str, Any], default: Sampling) -> Sampling:
    """Sampling parameters of a request.

    Args:
        fields: The request. `do_sample` and `subtalker_dosample` select greedy decoding if false.
        default: Parameters that the request does not set.

    Raises:
        RequestError: A value is invalid.
    """
    parameters: dict[str, Any] = {}
    for name, ours in _GREEDY.items():
        if not get_field(fields, name, bool, True):
            parameters[ours] = 0.0
    sampling = replace(default, **parameters) if parameters else default
    for name, ours in _SAMPLING.items():
        if fields.get(name) is None or ours in parameters:
            continue
        try:
            sampling = replace(sampling, **{ours: fields[name]})
        except SamplingError as error:
            message = str(error).replace(ours, name, 1)
            raise RequestError(message, 400, "invalid_sampling", name) from None
    return sampling


def speed_of(fields: Mapping[str, Any]) -> float:
    """The field `speed`: how many times as fast as ordinary speech.

    Raises:
        RequestError: It is no number from 0.5 to 2.
    """
    speed = get_field(fields, "speed", float, 1.0)
    try:
        check_speed(speed)
    except MegakernelTTSError as error:
        raise request_error(error) from None
    return speed


def pronunciations_of(fields: Mapping[str, Any]) -> Pronunciations:
    """The field `pronunciations`: an object with words and their respellings.

    Raises:
        RequestError: An entry is invalid, or there are too many.
    """
    table = get_field(fields, "pronunciations", dict, None)
    if table is None:
        return _NO_PRONUNCIATIONS
    if len(table) > _MAX_PRONUNCIATIONS:
        raise RequestError(
            f"pronunciations has {len(table):,} entries; at most {_MAX_PRONUNCIATIONS:,} are "
            "allowed in a request.",
            parameter="pronunciations",
        )
    try:
        return Pronunciations(table)
    except MegakernelTTSError as error:
        raise request_error(error) from None
