"""Refusals: the reason for which a request is not served, independent of the protocol."""

from megakernel_tts import (
    EngineBusyError,
    EngineClosedError,
    MegakernelTTSError,
    MissingExtraError,
    PronunciationError,
    SpeedError,
    TextError,
    VoiceError,
)

RETRY_AFTER_S = 1  # after which a client may repeat a request that met an overload


class RequestError(Exception):
    """A request is refused, or its speech failed. Adapters render it in their protocol's format.

    Attributes:
        message: One sentence or two for the client.
        status: HTTP status code.
        code: Short name of the reason.
        parameter: Field of the request that is wrong, if it is one.
    """

    def __init__(
        self, message: str, status: int = 400, code: str = "invalid_value", parameter: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.parameter = parameter

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the reply: `Retry-After` for an overload."""
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}

    @property
    def close_code(self) -> int:
        """Code with which the error closes a WebSocket: a server error, or a policy violation."""
        return 1011 if self.status >= 500 else 1008


class SlowClientError(Exception):
    """The client reads audio more slowly than it is played, beyond the tolerance."""


def request_error(error: MegakernelTTSError) -> RequestError:
    """Gives the refusal for an error of the engine."""
    message = str(error)
    if isinstance(error, TextError):
        return RequestError(message, 400, "invalid_text", "input")
    if isinstance(error, VoiceError):
        return RequestError(message, 400, "invalid_voice", "voice")
    if isinstance(error, SpeedError):
        return RequestError(message, parameter="speed")
    if isinstance(error, PronunciationError):
        return RequestError(message, parameter="pronunciations")
    if isinstance(error, MissingExtraError):
        return RequestError(f"The server does not support this: {message}", 400, "not_installed")
    if isinstance(error, EngineBusyError):
        return RequestError(message, 429, "overloaded")
    if isinstance(error, EngineClosedError):
        return RequestError(message, 503, "engine_closed")
    return RequestError(message, 500, "synthesis_failed")
