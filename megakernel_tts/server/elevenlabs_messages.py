"""ElevenLabs' messages: parameters and requests of a client, and what answers them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megakernel_tts.server import codecs
from megakernel_tts.server.character_times import CharacterSpan
from megakernel_tts.server.encoding import AudioFormat, Encoding
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import (
    get_field,
    priority_of,
    pronunciations_of,
    sampling_of,
    speed_of,
)
from megakernel_tts.server.http import base64_text
from megakernel_tts.server.speech_stream import SpeechRequest
from megakernel_tts.server.streams import SpeechStreams

_ENCODINGS: dict[str, tuple[Encoding, str]] = {  # and the media type
    "pcm": ("pcm_s16le", "audio/pcm"),
    "ulaw": ("pcm_mulaw", "audio/basic"),
    "alaw": ("pcm_alaw", "audio/x-alaw-basic"),
}
_FORMAT = re.compile(
    r"(?P<samples>pcm|ulaw|alaw)_(?P<rate>[0-9]{1,6})"
    r"|mp3_(?P<mp3_rate>[0-9]{1,6})_(?P<kilobits>[0-9]{1,3})"
)
_DEFAULT_FORMAT = "mp3_44100_128"
_WHOLE_NUMBER = re.compile("[0-9]{1,18}")
_MAX_IDLE_S, _DEFAULT_IDLE_S = 180, 20


def output_format(query: Mapping[str, str]) -> tuple[AudioFormat, str]:
    """The format of the audio, and its media type.

    Args:
        query: Parameters of the URL; `output_format` is an encoding and a sample rate, as in
            `pcm_24000`, or mp3 with a bit rate: `mp3_44100_128`.

    Raises:
        RequestError: The format is not supported.
    """
    name = query.get("output_format", _DEFAULT_FORMAT)
    match = _FORMAT.fullmatch(name)
    if match is None:
        raise RequestError(
            f"output_format {name[:100]} is not supported; choose pcm_24000 (or another rate), "
            "ulaw_8000, alaw_8000 or mp3_44100_128 (or another rate and bit rate).",
            400,
            "unsupported_output_format",
            "output_format",
        )
    if match["samples"] is None:
        rate, bit_rate = int(match["mp3_rate"]), 1000 * int(match["kilobits"])
        mp3 = AudioFormat.compressed("mp3", rate, bit_rate, parameter="output_format")
        return mp3, codecs.media_type("mp3")
    encoding, media_type = _ENCODINGS[match["samples"]]
    return AudioFormat.parse(encoding, int(match["rate"])), media_type


def speech_request(
    voice_id: str,
    query: Mapping[str, str],
    fields: Mapping[str, Any],
    streams: SpeechStreams,
    *,
    text: str | None,
) -> SpeechRequest:
    """The speech that a request describes.

    Args:
        voice_id: A voice, from the URL.
        query: Parameters of the URL.
        fields: The body, if any. The model is not checked: this server has one.
        streams: The streams of the server.
        text: The whole text; None if it is still being written.

    Raises:
        RequestError: A parameter or field is invalid.
    """
    language = get_field(fields, "language_code", str, query.get("language_code", "auto"))
    if "seed" in query:
        fields = {"seed": _whole_number(query, "seed", 0), **fields}
    return SpeechRequest(
        text=text,
        voice=streams.catalog.voice(voice_id),
        language=streams.catalog.language(language),
        instruct=get_field(fields, "instruct", str, "") or None,
        sampling=sampling_of(fields, streams.default_sampling),
        audio_format=output_format(query)[0],
        paced=text is None,
        speed=speed_of(get_field(fields, "voice_settings", dict, {})),
        pronunciations=pronunciations_of(fields),
        priority=priority_of(query),
    )


def max_idle_s(query: Mapping[str, str]) -> int:
    """Seconds without a message after which the text of a context ends.

    Raises:
        RequestError: `inactivity_timeout` is no number from 1 to 180.
    """
    seconds = _whole_number(query, "inactivity_timeout", _DEFAULT_IDLE_S)
    if not 1 <= seconds <= _MAX_IDLE_S:
        raise RequestError(
            f"inactivity_timeout is {seconds}; it must be from 1 to {_MAX_IDLE_S} seconds.",
            parameter="inactivity_timeout",
        )
    return seconds


def _whole_number(query: Mapping[str, str], name: str, default: int) -> int:
    value = query.get(name, str(default))
    if not _WHOLE_NUMBER.fullmatch(value):
        raise RequestError(f"{name} is {value[:100]!r}; it must be a whole number.", parameter=name)
    return int(value)


def audio_message(audio: bytes, span: CharacterSpan, *, synchronous: bool) -> dict[str, Any]:
    """The message with a chunk's audio and the characters that start in it.

    Clients without `sync_alignment` take the times as relative to the message, and add up either
    the audio or the durations of characters. A message without a character, which comes after all
    those of a word, then has a space, so that both sums are the same. LiveKit's client takes the
    times as relative to the context.

    Args:
        audio: Encoded samples; may be empty.
        span: The characters.
        synchronous: Whether the client requested `sync_alignment`.
    """
    origin_ms = 0 if synchronous else span.start_ms
    if not span.characters and not synchronous:
        span = replace(span, characters=[" "], starts_ms=[span.start_ms])
    times = zip(span.starts_ms, span.stops_ms, strict=True)
    alignment = {
        "chars": span.characters,
        "charStartTimesMs": [start_ms - origin_ms for start_ms in span.starts_ms],
        "charDurationsMs": [stop_ms - start_ms for start_ms, stop_ms in times],
    }
    return {
        "audio": base64_text(audio),
        "isFinal": None,
        "alignment": alignment if span.characters else None,
        "normalizedAlignment": alignment if span.characters else None,
    }


def timed_audio(audio: bytes, span: CharacterSpan) -> dict[str, Any]:
    """A line of the HTTP reply with times."""
    return {"audio_base64": base64_text(audio)} | alignments(span)


def alignments(span: CharacterSpan) -> dict[str, Any]:
    """The fields with the characters of an HTTP reply, timed in seconds from its start."""
    alignment = {
        "characters": span.characters,
        "character_start_times_seconds": [start_ms / 1000 for start_ms in span.starts_ms],
        "character_end_times_seconds": [stop_ms / 1000 for stop_ms in span.stops_ms],
    }
    times = alignment if span.characters else None
    return {"alignment": times, "normalized_alignment": times}


def final_message() -> dict[str, Any]:
    """The last message of a context."""
    return {"audio": None, "isFinal": True}


def error_message(error: RequestError) -> dict[str, Any]:
    """The message of an error, which is the last one of its context.

    LiveKit's client ends a context for `error`, Pipecat's for `isFinal` only.
    """
    message = {"error": error.code, "message": error.message, "code": error.close_code}
    return message | {"isFinal": True}


def error_body(error: RequestError) -> dict[str, Any]:
    """The body of an HTTP error."""
    return {"detail": {"status": error.code, "message": error.message}}
