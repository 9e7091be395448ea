"""Cartesia's messages: requests of a client, and the events that answer them."""

from collections.abc import Mapping, Sequence
from typing import Any

from megakernel_tts import Finish, Word
from megakernel_tts.server.encoding import SOURCE_RATE, AudioFormat
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import (
    get_field,
    priority_of,
    pronunciations_of,
    sampling_of,
    speed_of,
    voice_name,
)
from megakernel_tts.server.http import base64_text
from megakernel_tts.server.speech_stream import SpeechChunk, SpeechRequest
from megakernel_tts.server.streams import SpeechStreams
from megakernel_tts.server.word_times import word_ends

_SPEEDS = {"slow": 0.8, "normal": 1.0, "fast": 1.25}  # of earlier versions
_PARTIAL = 206  # status code of an event


def output_format(message: Mapping[str, Any], containers: Sequence[str]) -> tuple[AudioFormat, str]:
    """The format of the audio, and its container.

    Args:
        message: A request.
        containers: The containers that its endpoint has, of `raw`, `wav` and `mp3`.

    Raises:
        RequestError: The format is not supported.
    """
    fields = get_field(message, "output_format", dict, {})
    container = get_field(fields, "container", str, "raw")
    if container not in containers:
        raise RequestError(
            f"container is {container!r}; choose one of: {', '.join(containers)}.",
            parameter="output_format",
        )
    rate = fields.get("sample_rate", SOURCE_RATE)
    if container == "mp3":
        bit_rate = get_field(fields, "bit_rate", int, None)
        mp3 = AudioFormat.compressed("mp3", rate, bit_rate, parameter="output_format")
        return mp3, container
    return AudioFormat.parse(fields.get("encoding", "pcm_s16le"), rate), container


def speech_request(
    message: Mapping[str, Any],
    streams: SpeechStreams,
    audio_format: AudioFormat,
    *,
    text: str | None,
    paced: bool,
) -> SpeechRequest:
    """The speech that a message describes.

    Args:
        message: A request. The model is not checked: this server has one.
        streams: The streams of the server.
        audio_format: From `output_format`.
        text: The whole text; None if more may follow.
        paced: See `SpeechRequest`.

    Raises:
        RequestError: A field is invalid.
    """
    language = message.get("locale") or get_field(message, "language", str, "auto")
    if not isinstance(language, str):
        raise RequestError("locale must be a string.", parameter="locale")
    return SpeechRequest(
        text=text,
        voice=streams.catalog.voice(voice_name(message.get("voice"))),
        language=streams.catalog.language(language),
        instruct=get_field(message, "instruct", str, "") or None,
        sampling=sampling_of(message, streams.default_sampling),
        audio_format=audio_format,
        paced=paced,
        speed=_speed(message),
        pronunciations=pronunciations_of(message),
        priority=priority_of(message),
    )


def _speed(message: Mapping[str, Any]) -> float:
    """The speed, from `generation_config` or, as in earlier versions, from the message.

    Raises:
        RequestError: It is invalid.
    """
    config = get_field(message, "generation_config", dict, {})
    if config.get("speed") is not None:
        return speed_of(config)
    speed = message.get("speed")
    if isinstance(speed, str) and speed in _SPEEDS:
        return _SPEEDS[speed]
    return speed_of(message)


def chunk_event(chunk: SpeechChunk, step_ms: float, *, details: bool = False) -> dict[str, Any]:
    """The event with a chunk's audio, which must not be empty.

    Args:
        chunk: The chunk.
        step_ms: Milliseconds since the chunk before.
        details: Whether to add the segment of the text, whether the audio is a break, and the
            waiting time for a slot.
    """
    event = _event("chunk", data=base64_text(chunk.audio), step_time=round(step_ms, 3))
    if details:
        event["segment"] = chunk.segment
        event["is_break"] = chunk.is_break
        event["slot_wait_s"] = chunk.slot_wait_s
    return event


def timestamps_event(words: Sequence[Word], *, details: bool = False) -> dict[str, Any]:
    """The event with words that begin in the next chunk.

    Args:
        words: The words.
        details: Whether to add which starts are estimates.
    """
    starts = [word.start for word in words]
    texts = [word.text for word in words]
    times: dict[str, Any] = {"words": texts, "start": starts, "end": word_ends(words)}
    if details:
        times["estimated"] = [word.estimated for word in words]
    return _event("timestamps", word_timestamps=times)


def flush_done_event(flush_id: int) -> dict[str, Any]:
    """The event after the audio of the text before a flush."""
    return _event("flush_done", flush_done=True, flush_id=flush_id)


def done_event(finish: Finish | None = None) -> dict[str, Any]:
    """The last event.

    Args:
        finish: The end of the stream, whose reason is added; None to add none.
    """
    event = _event("done") | {"done": True}
    return event if finish is None else event | {"finish_reason": finish.reason}


def error_event(error: RequestError, request_id: str) -> dict[str, Any]:
    """The event of an error.

    `done` is false: LiveKit's client takes an event with a true one for an ordinary end.
    """
    return {
        "type": "error",
        "done": False,
        "status_code": error.status,
        "error_code": error.code,
        "title": "Server error" if error.status >= 500 else "Request error",
        "message": error.message,
        "request_id": request_id,
    }


def _event(kind: str, **fields: object) -> dict[str, Any]:
    return {"type": kind, "done": False, "status_code": _PARTIAL, **fields}
