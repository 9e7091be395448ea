"""Errors of the services, and Pipecat's categories of the engine's errors."""

from pipecat.processors.frame_processor import FrameProcessor
from pipecat.utils.errors import ErrorCategory

from megakernel_tts import (
    EngineBusyError,
    EngineClosedError,
    MegakernelTTSError,
    MissingExtraError,
    PronunciationError,
    SamplingError,
    SpeedError,
    SynthesisError,
    TextError,
    VoiceError,
)

_INVALID_SETTINGS = VoiceError, SamplingError, SpeedError, PronunciationError, MissingExtraError


class ColdEngineError(RuntimeError):
    """The engine was not warmed up before it was given to a service."""


def check_warm(warm: bool) -> None:
    """Checks that an engine was warmed up.

    Args:
        warm: `TTS.warm` or `STT.warm`.

    Raises:
        ColdEngineError: It was not.
    """
    if not warm:
        raise ColdEngineError(
            "The engine is cold, and the first caller would wait for it to load and warm up: "
            "call `await engine.awarmup()` once, before any pipeline starts."
        )


class ServerError(SynthesisError):
    """A server cannot be reached, or it refused or failed a request.

    Attributes:
        category: Pipecat's category.
    """

    def __init__(self, message: str, category: ErrorCategory) -> None:
        super().__init__(message)
        self.category = category


def error_category(error: MegakernelTTSError) -> ErrorCategory:
    """Pipecat's category of an error, which decides whether an operation may be tried again."""
    if isinstance(error, ServerError):
        return error.category
    if isinstance(error, _INVALID_SETTINGS):
        return ErrorCategory.INVALID_REQUEST
    if isinstance(error, TextError):
        return ErrorCategory.APPLICATION
    if isinstance(error, EngineBusyError):
        return ErrorCategory.RATE_LIMIT
    return ErrorCategory.SERVER


def is_permanent(error: MegakernelTTSError) -> bool:
    """Whether the service cannot speak any more, whatever the category."""
    return isinstance(error, EngineClosedError)


async def report_error(service: FrameProcessor, error: MegakernelTTSError) -> None:
    """Pushes an error of the engine as an `ErrorFrame` of a service."""
    await service.push_error(
        str(error),
        error,
        category=error_category(error),
        force_treat_as_permanent=is_permanent(error),
    )
