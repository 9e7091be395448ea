"""Refusals: the reason for which a request is not served, independent of the protocol."""

from megakernel_tts import (
    EngineBusyError,
    EngineClosedError,
    InstructionError,
    MegakernelTTSError,
    MissingExtraError,
    PronunciationError,
    SpeedError,
    SynthesisError,
    TextError,
    VoiceError,
)

RETRY_AFTER_S = 1  # after which a client may repeat a request that was refused for overload


class RequestError(Exception):
    """A request is refused, or its speech failed. Adapters render it in their protocol's format.

    Attributes:
        message: One sentence or two for the client.
        status: HTTP status code.
        code: Short name of the reason.
        parameter: Field of the request that is wrong, if it is one.
        reason: Why the server refuses a request that is valid, for metrics; empty for another
            error.
        retry_after_s: Seconds after which the client may repeat a request with status 429 or 503.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str = "invalid_value",
        parameter: str = "",
        *,
        reason: str = "",
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.parameter = parameter
        self.reason = reason
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the reply: `Retry-After` for an overload, the end of a late request."""
        if self.status in (429, 503):
            return {"Retry-After": str(self.retry_after_s)}
        if self.status in (408, 413):  # the rest of the body would keep the connection open
            return {"Connection": "close"}
        return {}

    @property
    def close_code(self) -> int:
        """Code with which the error closes a WebSocket: a server error, or a policy violation."""
        return 1011 if self.status >= 500 else 1008


class SlowClientError(Exception):
    """The client reads audio more slowly than it is played, beyond the tolerance."""


class EngineProcessError(SynthesisError):
    """A stream has failed in another process, which has logged why."""


def overload_error(cause: str, status: int, reason: str) -> RequestError:
    """The refusal of a request because of others."""
    message = f"The server is overloaded: {cause}. Try again later."
    return RequestError(message, status, "overloaded", reason=reason)


def request_error(error: MegakernelTTSError) -> RequestError:
    """Gives the refusal for an error of the engine."""
    message = str(error)
    if isinstance(error, TextError):
        return RequestError(message, 400, "invalid_text", "input")
    if isinstance(error, InstructionError):
        return RequestError(message, 400, "invalid_instructions", "instructions")
    if isinstance(error, VoiceError):
        return RequestError(message, 400, "invalid_voice", "voice")
    if isinstance(error, SpeedError):
        return RequestError(message, parameter="speed")
    if isinstance(error, PronunciationError):
        return RequestError(message, parameter="pronunciations")
    if isinstance(error, MissingExtraError):
        return RequestError(f"The server does not support this: {message}", 400, "not_installed")
    if isinstance(error, EngineBusyError):
        return RequestError(message, 429, "overloaded", reason="overload")
    if isinstance(error, EngineClosedError):
        return RequestError(message, 503, "engine_closed")
    return RequestError(message, 500, "synthesis_failed")
