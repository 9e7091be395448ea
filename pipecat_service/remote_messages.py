"""Messages of `megakernel-tts serve`: its description, and requests of a session."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pipecat.utils.errors import ErrorCategory, classify_http_status_code
from pipecat.utils.types import assert_given

from megakernel_tts import ModelInfo, Sampling
from pipecat_service.errors import ServerError
from pipecat_service.protocol import SOURCE_RATE
from pipecat_service.settings import MegakernelTTSSettings

_TEXT_ERRORS = ("invalid_text", "text_too_long", "string_above_max_length")

# Field of `Sampling` -> field of a request, where they differ.
_SAMPLING = {
    "predictor_temperature": "subtalker_temperature",
    "predictor_top_k": "subtalker_top_k",
    "predictor_top_p": "subtalker_top_p",
    "max_frames": "max_new_tokens",
}


def model_info(status: Mapping[str, Any], url: str) -> tuple[ModelInfo, list[str]]:
    """Describes the model of a server.

    Args:
        status: Content of `/status`.
        url: Address of the server, for an error.

    Returns:
        The description, and the names of the cloned voices.

    Raises:
        ServerError: A field is missing.
    """
    try:
        voices = {voice["name"]: tuple(voice["languages"]) for voice in status["voices"]}
        info = ModelInfo(
            kind=status["kind"],
            voices={} if status["kind"] == "base" else voices,
            languages=tuple(status["languages"]),
            takes_instruct=status["takes_instruct"],
            note=status["note"],
            name=status["model"],
        )
    except (KeyError, TypeError) as error:
        raise foreign_server_error(url, f"/status lacks {error}") from None
    return info, [*voices] if info.kind == "base" else []


def request_fields(settings: MegakernelTTSSettings) -> dict[str, Any]:
    """Fields of a session's first message.

    Args:
        settings: How to speak; they were checked.
    """
    fields: dict[str, Any] = {
        "model_id": assert_given(settings.model),
        "language": str(assert_given(settings.language) or "auto"),
        "instruct": assert_given(settings.instruct),
        "speed": assert_given(settings.speed),
        "pronunciations": dict(assert_given(settings.pronunciations) or {}),
        "output_format": {
            "container": "raw",
            "encoding": "pcm_s16le",
            "sample_rate": SOURCE_RATE,
        },
        "add_timestamps": True,
        "add_details": True,
        "auto_flush": False,
    }
    if (voice := assert_given(settings.voice)) is not None:
        fields["voice"] = {"mode": "id", "id": voice}
    return fields | _sampling_fields(assert_given(settings.sampling))


def _sampling_fields(sampling: Sampling | None) -> dict[str, Any]:
    values = asdict(sampling) if sampling is not None else {}
    return {_SAMPLING.get(name, name): value for name, value in values.items()}


def event_error(event: Mapping[str, Any], url: str) -> ServerError:
    """The error that an event reports.

    Args:
        event: An event of the type `error`.
        url: Address of the server.
    """
    category = classify_http_status_code(event["status_code"])
    if event["error_code"] in _TEXT_ERRORS:
        category = ErrorCategory.APPLICATION
    return ServerError(f"{event['message']} (the server at {url})", category)


def refusal_error(url: str, status: int) -> ServerError:
    """The error for a request or handshake that was refused.

    Args:
        url: Address of the server.
        status: HTTP status code.
    """
    if status in (401, 403):
        return ServerError(
            f"The server at {url} refused the API key; set api_key to one of its keys.",
            ErrorCategory.AUTHENTICATION,
        )
    if status == 404:
        return foreign_server_error(url, "it has no such page")
    return ServerError(
        f"The server at {url} refused the connection (status {status}).",
        classify_http_status_code(status),
    )


def unreachable_error(url: str, cause: BaseException) -> ServerError:
    """The error for a server that does not answer."""
    reason = "no answer in time" if isinstance(cause, TimeoutError) else str(cause)
    return ServerError(
        f"The server at {url} cannot be reached ({reason}); check the address, and that "
        "`megakernel-tts serve` runs there.",
        ErrorCategory.CONNECTIVITY,
    )


def lost_error(url: str) -> ServerError:
    """The error of speech whose connection was lost."""
    return ServerError(
        f"The connection to the server at {url} was lost.",
        ErrorCategory.CONNECTIVITY,
    )


def foreign_server_error(url: str, found: str) -> ServerError:
    """The error for a server that is not `megakernel-tts serve` of this version."""
    return ServerError(
        f"The server at {url} is not `megakernel-tts serve` of this version ({found}); check the "
        "address, and install the same version at both ends.",
        ErrorCategory.INVALID_REQUEST,
    )
