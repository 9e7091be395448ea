"""What can go wrong, and what it means to Pipecat."""

from pipecat.utils.errors import ErrorCategory

from megakernel_tts import (
    EngineBusyError,
    EngineClosedError,
    MegakernelTTSError,
    SamplingError,
    TextError,
    VoiceError,
)


class ColdEngineError(RuntimeError):
    """The engine was not warmed up before a service was made with it."""


def category(error: MegakernelTTSError) -> ErrorCategory:
    """Why an operation failed, in Pipecat's words; some categories mean: do not try again."""
    if isinstance(error, VoiceError | SamplingError):
        return ErrorCategory.INVALID_REQUEST
    if isinstance(error, TextError):
        return ErrorCategory.APPLICATION
    if isinstance(error, EngineBusyError):
        return ErrorCategory.RATE_LIMIT
    return ErrorCategory.SERVER


def permanent(error: MegakernelTTSError) -> bool:
    """Whether the service cannot speak any more, whatever the category says."""
    return isinstance(error, EngineClosedError)
