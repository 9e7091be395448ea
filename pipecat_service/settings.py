"""What may change while a pipeline runs, and how Pipecat's languages are named here."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipecat.services.settings import TTSSettings
from pipecat.transcriptions.language import Language
from pipecat.utils.types import NOT_GIVEN, NotGiven

from megakernel_tts import ModelInfo, Sampling, Voice, VoiceError

_LANGUAGES = {
    "zh": "chinese",
    "cmn": "chinese",
    "en": "english",
    "ja": "japanese",
    "ko": "korean",
    "de": "german",
    "fr": "french",
    "ru": "russian",
    "pt": "portuguese",
    "es": "spanish",
    "it": "italian",
}


@dataclass
class MegakernelTTSSettings(TTSSettings):
    """Settings of `MegakernelTTSService`; each may be changed by a `TTSUpdateSettingsFrame`.

    A change in the middle of a turn holds for the rest of the turn.

    Parameters:
        model: A label for metrics; the model itself is the engine's and cannot be changed.
        voice: A named voice of the model, or the name of a cloned one given to the service. The
            first of them, if none is given to begin with.
        language: A Pipecat language, one of the model's own names, or None: the model finds out.
        instruct: How to speak (1.7B-CustomVoice), or who (VoiceDesign, which needs it).
        sampling: How codes are drawn; None: as the model's own configuration says.
    """

    instruct: str | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)
    sampling: Sampling | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)


def default_settings(label: str) -> MegakernelTTSSettings:
    """The model's first voice, in the language of the text.

    Args:
        label: The model's.
    """
    return MegakernelTTSSettings(
        model=label, voice=None, language=None, instruct=None, sampling=None
    )


def known_voices(info: ModelInfo, cloned: Mapping[str, Voice]) -> tuple[str, ...]:
    """The names that `voice` may be."""
    return tuple(cloned) if info.kind == "base" else tuple(info.voices)


def check_voice(
    name: str | None, instruct: str | None, info: ModelInfo, cloned: Mapping[str, Voice]
) -> None:
    """Refuses a voice that the model cannot speak with.

    Raises:
        VoiceError: With the choices.
    """
    if info.kind == "voice_design":
        if name is not None or not (instruct and instruct.strip()):
            found = f"found the voice {name!r}" if name is not None else "found none"
            raise VoiceError(
                "A VoiceDesign model has no named voices and needs a description of one "
                f"({found}): Settings(instruct='...')."
            )
        return
    known = known_voices(info, cloned)
    if info.kind == "base" and not known:
        raise VoiceError(
            "A Base model speaks with cloned voices; give the service some: "
            "voices={'anna': engine.clone('anna.wav', 'What Anna says in it.')}."
        )
    if name is None or name.strip().lower() not in {voice.lower() for voice in known}:
        raise VoiceError(f"There is no voice {name!r}; choose one of: {', '.join(known)}.")


def language_name(language: Language) -> str | None:
    """The model's name of a language, whatever its region; None if it has no such language."""
    return _LANGUAGES.get(language.value.split("-")[0].lower())
