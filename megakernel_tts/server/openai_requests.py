"""Requests of OpenAI's speech API, with the fields that vLLM-Omni, SGLang-Omni and Nari add."""

from collections.abc import Mapping
from typing import Any

from megakernel_tts import Voice
from megakernel_tts.server import codecs
from megakernel_tts.server.cloning import MAX_INLINE_CHARACTERS
from megakernel_tts.server.encoding import SOURCE_RATE, AudioFormat
from megakernel_tts.server.engine import TextLayout
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.fields import (
    get_field,
    priority_of,
    pronunciations_of,
    sampling_of,
    speed_of,
    text_field,
    voice_name,
)
from megakernel_tts.server.http import MAX_BODY_BYTES
from megakernel_tts.server.reports import Caller
from megakernel_tts.server.speech_stream import SpeechRequest
from megakernel_tts.server.streams import SpeechStreams
from megakernel_tts.server.voices import Catalog

WAV = "audio/wav"

# Values of `response_format`, and their MIME types.
_SAMPLES = {"wav": WAV, "pcm": "audio/pcm", "mulaw": "audio/basic"}
_TELEPHONE_RATE = 8_000
_EMBEDDING = "speaker_embedding"
_TASKS = {"base": "Base", "custom_voice": "CustomVoice", "voice_design": "VoiceDesign"}  # by kind


def max_body_bytes(streams: SpeechStreams) -> int:
    """Maximum size of a request, which may hold a recording if the model clones voices."""
    return MAX_BODY_BYTES + (MAX_INLINE_CHARACTERS if streams.cloner.available else 0)


async def speech_request(
    fields: Mapping[str, Any], streams: SpeechStreams, caller: Caller
) -> tuple[SpeechRequest, str]:
    """The speech that a request describes, and the MIME type of its audio.

    Args:
        fields: The request; its voice may be a recording, which is cloned here.
        streams: The streams of the server.
        caller: Who requests it.

    Raises:
        RequestError: A field is invalid, or the server is overloaded.
    """
    catalog = streams.catalog
    catalog.check_model(fields.get("model"))
    _check_task(fields, catalog)
    audio_format, media_type = _audio_format(fields)
    speech = SpeechRequest(
        text=text_field(fields, "input"),
        language=catalog.language(get_field(fields, "language", str, "auto")),
        instruct=get_field(fields, "instructions", str, "")
        or get_field(fields, "instruct", str, "")
        or None,
        sampling=sampling_of(fields, streams.default_sampling),
        audio_format=audio_format,
        paced=False,
        layout=_layout(fields),
        first_frames=_first_frames(fields),
        speed=speed_of(fields),
        pronunciations=pronunciations_of(fields),
        priority=priority_of(fields),
        voice=await _voice(fields, streams, caller),  # the last one, because cloning takes time
    )
    return speech, media_type


def usage_of(num_characters: int, num_frames: int) -> dict[str, int]:
    """The usage of a request, which counts characters and frames."""
    return {
        "input_tokens": num_characters,
        "output_tokens": num_frames,
        "total_tokens": num_characters + num_frames,
    }


def _layout(fields: Mapping[str, Any]) -> TextLayout:
    """The layout of the text that the field `non_streaming_mode` selects."""
    non_streaming = get_field(fields, "non_streaming_mode", bool, None)
    if non_streaming is None:
        return "auto"
    return "full" if non_streaming else "streaming"


def _check_task(fields: Mapping[str, Any], catalog: Catalog) -> None:
    """Checks that the model is of the kind that the field `task_type` names, if any."""
    task = get_field(fields, "task_type", str, "")
    if task and task.lower().replace("_", "") != _TASKS[catalog.info.kind].lower():
        raise RequestError(
            f"task_type is {task[:100]!r}, and {catalog.model} is a {_TASKS[catalog.info.kind]} "
            "model; leave the field out, or serve a model of that kind.",
            parameter="task_type",
        )


def _first_frames(fields: Mapping[str, Any]) -> int | None:
    """The frames of the first chunk; None, also for 0, for the default."""
    name = "initial_codec_chunk_frames"
    num_frames = get_field(fields, name, int, 0)
    if num_frames < 0:
        raise RequestError(
            f"{name} is {num_frames}; it must be a number of frames, or 0.", parameter=name
        )
    return num_frames or None


async def _voice(
    fields: Mapping[str, Any], streams: SpeechStreams, caller: Caller
) -> str | Voice | None:
    """The voice of a recording or of an x-vector in the request, or of a name."""
    recording, transcript, parameter = _reference(fields)
    embedding = get_field(fields, _EMBEDDING, list, None)
    if embedding is not None:
        if recording is not None:
            raise RequestError(
                f"The request has a recording and a {_EMBEDDING}; send one of them.",
                parameter=_EMBEDDING,
            )
        return streams.cloner.of_embedding(embedding, parameter=_EMBEDDING)
    if recording is None:
        return streams.catalog.voice(voice_name(fields.get("voice") or fields.get("speaker")))
    streams.check_admission(caller, priority_of(fields))
    if get_field(fields, "x_vector_only_mode", bool, False):
        transcript = None
    return await streams.cloner.clone_base64(recording, transcript, parameter=parameter)


def _reference(fields: Mapping[str, Any]) -> tuple[str | None, str | None, str]:
    """The recording in a request, its transcript, and the field that holds the recording."""
    recording = _single_recording(fields)
    transcript = get_field(fields, "ref_text", str, None)
    references = get_field(fields, "references", list, None)
    if references is None:
        return recording, transcript, "ref_audio"
    if recording is not None or transcript is not None:
        raise RequestError(
            "references replaces ref_audio and ref_text; send one of them.", parameter="references"
        )
    if len(references) != 1 or not isinstance(references[0], dict):
        raise RequestError(
            "references must hold one object, because a voice is cloned from one recording.",
            parameter="references",
        )
    recording = get_field(references[0], "audio_path", str, "")
    return recording, get_field(references[0], "text", str, None), "references[0].audio_path"


def _single_recording(fields: Mapping[str, Any]) -> str | None:
    """The field `ref_audio`: a recording, or an array of one."""
    value = fields.get("ref_audio")
    if not isinstance(value, list):
        return get_field(fields, "ref_audio", str, None)
    if len(value) != 1 or not isinstance(value[0], str):
        raise RequestError(
            "ref_audio must be one recording, because a voice is cloned from one; cut several into "
            "one file.",
            parameter="ref_audio",
        )
    return value[0]


def _audio_format(fields: Mapping[str, Any]) -> tuple[AudioFormat, str]:
    """The format of the audio, and its MIME type."""
    name = get_field(fields, "response_format", str, "wav")
    default_rate = _TELEPHONE_RATE if name == "mulaw" else SOURCE_RATE
    rate = get_field(fields, "sample_rate", int, default_rate)
    if name in _SAMPLES:
        encoding = "pcm_mulaw" if name == "mulaw" else "pcm_s16le"
        return AudioFormat.parse(encoding, rate), _SAMPLES[name]
    codec = codecs.find(name)
    if codec is None:
        choices = ", ".join((*_SAMPLES, *codecs.NAMES))
        raise RequestError(
            f"response_format is {name!r}; choose one of {choices}.",
            400,
            "unsupported_format",
            "response_format",
        )
    audio_format = AudioFormat.compressed(codec, rate, parameter="response_format")
    return audio_format, codecs.media_type(codec)
