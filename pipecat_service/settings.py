"""Settings that may change while a pipeline runs, and the model's names of languages."""

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

    A change within a turn applies to the rest of the turn.

    Parameters:
        model: A label for metrics; the engine's model cannot be changed.
        voice: A named voice of the model, or the name of a cloned voice of the service. The default
            is the first voice.
        language: A Pipecat language, a language name of the model, or None to detect the language
            from the text.
        instruct: A description of the speaking style (1.7B-CustomVoice) or of the voice
            (VoiceDesign, where it is required).
        sampling: Sampling parameters; None takes those of the model's configuration.
    """

    instruct: str | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)
    sampling: Sampling | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)


def default_settings(label: str) -> MegakernelTTSSettings:
    """Settings with the model's first voice and the language of the text.

    Args:
        label: Of the model, for metrics.
    """
    return MegakernelTTSSettings(
        model=label, voice=None, language=None, instruct=None, sampling=None
    )


def voice_names(info: ModelInfo, cloned: Mapping[str, Voice]) -> tuple[str, ...]:
    """Valid values of the setting `voice`.

    Args:
        info: Describes the model.
        cloned: Cloned voices by name.
    """
    return tuple(cloned) if info.kind == "base" else tuple(info.voices)


def check_voice(
    name: str | None, instruct: str | None, info: ModelInfo, cloned: Mapping[str, Voice]
) -> None:
    """Checks that the model can speak with a voice.

    Args:
        name: Setting `voice`.
        instruct: Setting `instruct`.
        info: Describes the model.
        cloned: Cloned voices by name.

    Raises:
        VoiceError: It cannot; the message lists the valid names.
    """
    if info.kind == "voice_design":
        if name is not None or not (instruct and instruct.strip()):
            found = f"found the voice {name!r}" if name is not None else "found none"
            raise VoiceError(
                "A VoiceDesign model has no named voices and needs a description of one "
                f"({found}): Settings(instruct='...')."
            )
        return
    names = voice_names(info, cloned)
    if info.kind == "base" and not names:
        raise VoiceError(
            "A Base model speaks with cloned voices; give the service some: "
            "voices={'anna': engine.clone('anna.wav', 'What Anna says in it.')}."
        )
    if name is None or name.strip().lower() not in {voice.lower() for voice in names}:
        raise VoiceError(f"There is no voice {name!r}; choose one of: {', '.join(names)}.")


def language_name(language: Language) -> str | None:
    """The model's name of a language in any region; None if the model lacks the language."""
    return _LANGUAGES.get(language.value.split("-")[0].lower())
