"""Messages between the front and an engine process: typed records, in JSON.

The front numbers its requests: a `session` is the number of the request that opened it. The audio
of a `Chunk` is in the session's ring; all other content is in the messages.
"""

import json
import struct
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

import megakernel_tts
from megakernel_tts import (
    ChunkPolicy,
    Finish,
    MegakernelTTSError,
    ModelInfo,
    Sampling,
    Voice,
    Word,
)
from megakernel_tts.server.engine import TextLayout
from megakernel_tts.server.errors import EngineProcessError
from megakernel_tts.server.logs import LogFormat

FinishReason = Literal["eos", "length", "guard", "cancelled", "error"]

_SIZES = struct.Struct("<II")  # of the fields and of the body that follow
_ENCODER = json.JSONEncoder(default=vars, separators=(",", ":"))


@dataclass(frozen=True)
class Message:
    """A message. Its fields are sent as JSON, except for `body`, which holds bytes."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Makes a message of fields as JSON returns them."""
        return cls(**fields)


@dataclass(frozen=True)
class ErrorInfo:
    """An exception of this package (or a `ValueError`) in another process."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Describes an exception as the most specific public class that it is an instance of."""
        names = [base.__name__ for base in type(error).__mro__]
        kind = next((name for name in names if _exception_type(name)), MegakernelTTSError.__name__)
        return cls(kind, str(error) or type(error).__name__)

    def exception(self) -> Exception:
        """Makes the exception again."""
        return (_exception_type(self.kind) or MegakernelTTSError)(self.message)


def _exception_type(name: str) -> type[Exception] | None:
    """Returns the public exception of a name, `ValueError`, or None."""
    public = getattr(megakernel_tts, name) if name in megakernel_tts.__all__ else None
    if isinstance(public, type) and issubclass(public, MegakernelTTSError):
        return public
    return ValueError if name == "ValueError" else None


@dataclass(frozen=True)
class VoiceHeader:
    """Sizes of the arrays in a cloned voice's body, and its transcript.

    Attributes:
        hidden: Values of the x-vector.
        num_groups: Codes of a frame; 0 without a transcript.
        text: The transcript; None without one.
    """

    hidden: int
    num_groups: int
    text: str | None


def pack_voice(voice: Voice) -> tuple[VoiceHeader, bytes]:
    """Returns the header and the body of a cloned voice."""
    body = voice.x_vector.astype("<f4").tobytes()
    num_groups = 0
    if voice.codes is not None:
        num_groups = voice.codes.shape[1]
        body += voice.codes.astype("<i8").tobytes()
    return VoiceHeader(len(voice.x_vector), num_groups, voice.text), body


def unpack_voice(header: VoiceHeader, body: bytes) -> Voice:
    """Returns the voice of a header and a body.

    Raises:
        VoiceError: Its values are invalid.
    """
    x_vector = np.frombuffer(body, "<f4", header.hidden)
    if header.text is None:
        return Voice(x_vector)
    codes = np.frombuffer(body, "<i8", offset=4 * header.hidden)
    return Voice(x_vector, codes.reshape(-1, header.num_groups), header.text)


# --- from the front ---


@dataclass(frozen=True)
class Load(Message):
    """Load a model and warm it up; the first message.

    Attributes:
        name: Of the engine, for the log.
        model: As in `TTS.load`.
        device: As in `TTS.load`.
        slots: As in `TTS.load`.
        log_format: Format of the process's log.
        cache_positions: As in `TTS.load`.
        prefill_positions: As in `TTS.load`.
    """

    name: str
    model: str
    device: str
    slots: int
    log_format: LogFormat
    cache_positions: int | None = None
    prefill_positions: int | None = None


@dataclass(frozen=True, kw_only=True)
class SessionRequest:
    """What a session speaks, and how; as the arguments of `TTS.open`.

    Attributes:
        voice: A voice's name; None for the default, or for a cloned voice.
        cloned: Header of a cloned voice; None for other voices.
        language: As in `TTS.open`.
        instruct: As in `TTS.open`.
        layout: As in `TTS.open`.
        sampling: As in `TTS.open`.
        chunks: As in `TTS.open`.
        speed: As in `TTS.open`.
        pronunciations: A JSON object with the table.
        text: As in `TTS.open`.
        priority: As in `TTS.open`.
    """

    voice: str | None
    cloned: VoiceHeader | None
    language: str
    instruct: str | None
    layout: TextLayout
    sampling: Sampling
    chunks: ChunkPolicy
    speed: float
    pronunciations: str
    text: str | None
    priority: int

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Makes a request of fields as JSON returns them."""
        fields["cloned"] = fields["cloned"] and VoiceHeader(**fields["cloned"])
        fields["sampling"] = Sampling(**fields["sampling"])
        fields["chunks"] = ChunkPolicy(**fields["chunks"])
        return cls(**fields)


@dataclass(frozen=True)
class Open(Message):
    """Open a session whose audio is written to a ring; `Opened` or `Refused` replies.

    Attributes:
        session: A new number.
        ring: Index of a ring that no other session uses.
        request: The arguments.
        body: Arrays of a cloned voice, or empty.
    """

    session: int
    ring: int
    request: SessionRequest
    body: bytes = field(default=b"", repr=False)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """See `Message`."""
        fields["request"] = SessionRequest.from_fields(fields["request"])
        return cls(**fields)


@dataclass(frozen=True)
class Clone(Message):
    """Make a voice from a recording, which is the body; `Cloned` or `Refused` replies."""

    number: int
    text: str | None
    body: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class PushText(Message):
    """Add text to a session."""

    session: int
    text: str


@dataclass(frozen=True)
class Flush(Message):
    """Flush the text of a session."""

    session: int


@dataclass(frozen=True)
class End(Message):
    """End the text of a session."""

    session: int


@dataclass(frozen=True)
class Cancel(Message):
    """Cancel a session, which may still be opening."""

    session: int


@dataclass(frozen=True)
class Release(Message):
    """The reader has reached `position` in the ring of a session."""

    session: int
    position: int


@dataclass(frozen=True)
class Ping(Message):
    """`Pong` replies, unless the process hangs."""


# --- from an engine process ---


@dataclass(frozen=True)
class Loaded(Message):
    """The model was loaded."""

    info: ModelInfo
    sampling: Sampling
    slots: int

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """See `Message`."""
        info = fields["info"]
        info["voices"] = {name: tuple(names) for name, names in info["voices"].items()}
        info["languages"] = tuple(info["languages"])
        return cls(ModelInfo(**info), Sampling(**fields["sampling"]), fields["slots"])


@dataclass(frozen=True)
class Warm(Message):
    """The engine is warm: sessions may be opened."""


@dataclass(frozen=True)
class Pong(Message):
    """Replies to `Ping`.

    Attributes:
        frame_step_s: See `SpeechEngine.frame_step_s`.
    """

    frame_step_s: float


@dataclass(frozen=True)
class Failed(Message):
    """The model could not be loaded or warmed up; the process ends."""

    error: ErrorInfo

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """See `Message`."""
        return cls(ErrorInfo(**fields["error"]))


@dataclass(frozen=True)
class Opened(Message):
    """A session was opened."""

    session: int


@dataclass(frozen=True)
class Cloned(Message):
    """A voice was made from a recording; its arrays are the body."""

    number: int
    header: VoiceHeader
    body: bytes = field(default=b"", repr=False)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """See `Message`."""
        fields["header"] = VoiceHeader(**fields["header"])
        return cls(**fields)


@dataclass(frozen=True)
class Refused(Message):
    """A session was not opened, or a voice was not made."""

    number: int
    error: ErrorInfo

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """See `Message`."""
        return cls(fields["number"], ErrorInfo(**fields["error"]))


@dataclass(frozen=True)
class Chunk(Message):
    """A record was written to the ring of a session.

    Attributes:
        session: The session.
        num_frames: Frames of the record.
        words: Words that begin in it.
        slot_wait_s: Of the session, so far.
    """

    session: int
    num_frames: int
    words: tuple[Word, ...]
    slot_wait_s: float

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """See `Message`."""
        fields["words"] = tuple(Word(**word) for word in fields["words"])
        return cls(**fields)


@dataclass(frozen=True)
class Finished(Message):
    """A session has ended; its last message. The fields are those of `Finish`."""

    session: int
    reason: FinishReason
    frames: int
    error: str | None

    def finish(self) -> Finish:
        """Returns the last event of the session."""
        error = None if self.error is None else EngineProcessError(self.error)
        return Finish(self.reason, self.frames, error)


_TYPES = {message.__name__: message for message in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Returns the bytes of a message."""
    fields = {"type": type(message).__name__, **vars(message)}
    body = fields.pop("body", b"")
    content = _ENCODER.encode(fields).encode()
    return _SIZES.pack(len(content), len(body)) + content + body


def take(buffer: bytearray) -> Message | None:
    """Removes the first message from a buffer; None if it is not complete.

    Raises:
        KeyError: The content is no message.
        TypeError: Likewise.
        ValueError: Likewise.
    """
    if len(buffer) < _SIZES.size:
        return None
    content_size, body_size = _SIZES.unpack_from(buffer)
    body_start = _SIZES.size + content_size
    end = body_start + body_size
    if len(buffer) < end:
        return None
    fields = json.loads(buffer[_SIZES.size : body_start].decode())
    if body_size:
        fields["body"] = bytes(buffer[body_start:end])
    del buffer[:end]
    return _TYPES[fields.pop("type")].from_fields(fields)
