"""Settings that may change while a pipeline runs, and the model's names of languages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loguru import logger
from pipecat.services.settings import TTSSettings
from pipecat.transcriptions.language import Language
from pipecat.utils.types import NOT_GIVEN, NotGiven, assert_given, is_given

from megakernel_tts import (
    LANGUAGE_CODES,
    InstructionError,
    MegakernelTTSError,
    ModelInfo,
    Pronunciations,
    Sampling,
    SamplingError,
    VoiceError,
    check_speed,
)

if TYPE_CHECKING:
    from megakernel_tts import Voice  # needs safetensors, which a server's client may lack

_AUTOMATIC = "auto"  # the engine's name for the language of the text


@dataclass
class MegakernelTTSSettings(TTSSettings):
    """Settings of a service; each may be changed by a `TTSUpdateSettingsFrame`.

    A change within a turn applies to the rest of the turn. Values are checked when they are set: an
    invalid one is refused.

    Parameters:
        model: Model that the service loads, unless it is given an engine or uses a server. Cannot
            be changed later.
        voice: A named voice of the model, or the name of a cloned voice of the service or the
            server. The default is the first voice.
        language: A Pipecat language, a language name of the model, or None to detect the language
            from the text, as for a language that the model lacks.
        instruct: A description of the speaking style (1.7B-CustomVoice) or of the voice
            (VoiceDesign, where it is required).
        sampling: Sampling parameters; None takes those of the model's configuration.
        speed: From 0.5 to 2, at the same pitch; None is 1. Other speeds need the extra `speed`
            where the engine is.
        pronunciations: Respellings of words (see `Pronunciations`), or None. The conversation keeps
            the words as they are written.
    """

    instruct: str | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)
    sampling: Sampling | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)
    speed: float | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)
    pronunciations: Mapping[str, str] | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)


def default_settings(model: str | None) -> MegakernelTTSSettings:
    """Settings with the model's first voice and the language of the text.

    Args:
        model: Name of the model; None if it is not known yet.
    """
    return MegakernelTTSSettings(
        model=model,
        voice=None,
        language=None,
        instruct=None,
        sampling=None,
        speed=None,
        pronunciations=None,
    )


class SettingsCheck:
    """Checks settings for a model and its cloned voices."""

    def __init__(
        self,
        info: ModelInfo,
        cloned: "Mapping[str, str | Voice]",
        check_voice: "Callable[[str | Voice | None, str, str | None], None]",
        check_speed: Callable[[float], None] = check_speed,
    ) -> None:
        """Prepares the checks.

        Args:
            info: Describes the model.
            cloned: What stands for a cloned voice in a request, by name; names differ in more than
                case.
            check_voice: As `TTS.check_voice` of the model.
            check_speed: As `megakernel_tts.check_speed`.
        """
        self._info = info
        self._cloned = {_normalized(name): voice for name, voice in cloned.items()}
        self._voices = tuple(cloned) if info.kind == "base" else tuple(info.voices)
        self._check_voice_in_model = check_voice
        self._check_speed_in_model = check_speed
        self._checks = {
            "voice": self._check_voice,
            "instruct": self._check_instruct,
            "sampling": self._check_sampling,
            "speed": self._check_speed,
            "pronunciations": self._check_pronunciations,
        }

    def complete(self, settings: MegakernelTTSSettings) -> None:
        """Checks the settings of a service, and sets those that depend on the model.

        Args:
            settings: Get the model's first voice if they name none, and its name of the language.

        Raises:
            VoiceError: The model has no such voice, clones no voices, or the voice does not fit it.
            InstructionError: The model follows no instruction or needs one; or the instruction is
                too long, or not Unicode text.
            SamplingError: `sampling` is of another type.
            SpeedError: `speed` is no number from 0.5 to 2.
            MissingExtraError: `speed` is not 1, and the extra `speed` is not installed.
            PronunciationError: `pronunciations` has an invalid entry.
        """
        if self._cloned and self._info.kind != "base":
            raise VoiceError(
                f"{self._info.name} is a {self._info.kind} model, and only Base models speak with "
                "cloned voices; leave voices out."
            )
        if settings.voice is None:
            settings.voice = next(iter(self._voices), None)
        for name, check in self._checks.items():
            check(getattr(settings, name))
        self._check_in_model(settings)
        self.resolve_language(settings)

    def accepted(
        self, current: MegakernelTTSSettings, delta: TTSSettings
    ) -> tuple[TTSSettings, list[MegakernelTTSError]]:
        """Checks new settings.

        Args:
            current: Settings of the service.
            delta: New settings.

        Returns:
            Those that are valid, and an error for each other one.
        """
        accepted, errors = replace(delta), list[MegakernelTTSError]()
        if accepted.voice is None:
            accepted.voice = next(iter(self._voices), None)
        candidate = replace(current)
        for name, check in self._checks.items():
            value = getattr(accepted, name, NOT_GIVEN)
            if not is_given(value):
                continue
            changed = replace(candidate, **{name: value})
            try:
                check(value)
                if name in ("voice", "instruct"):
                    self._check_in_model(changed)
                candidate = changed
            except MegakernelTTSError as error:
                errors.append(error)
                setattr(accepted, name, NOT_GIVEN)
        return accepted, errors

    def voice(self, settings: MegakernelTTSSettings) -> "str | Voice | None":
        """The voice in a request: what stands for a cloned voice, or a name.

        Args:
            settings: Name a voice that was checked, or none.
        """
        name = assert_given(settings.voice)
        if name is None or self._info.kind != "base":
            return name
        return self._cloned[_normalized(name)]

    def _check_in_model(self, settings: MegakernelTTSSettings) -> None:
        # The language becomes one of the model's, so that its value does not matter.
        self._check_voice_in_model(
            self.voice(settings), _AUTOMATIC, assert_given(settings.instruct)
        )

    def resolve_language(self, settings: MegakernelTTSSettings) -> None:
        """Replaces a language that the voice lacks by its base language, or None: from the text."""
        language = settings.language
        if language is None:
            return
        name = _normalized(str(language))
        voice = _normalized(str(settings.voice))
        languages = {*self._info.languages, *self._info.voices.get(voice, ())}
        base = LANGUAGE_CODES.get(name.split("-")[0])
        settings.language = next((known for known in (name, base) if known in languages), None)
        if settings.language != name and name != _AUTOMATIC:
            logger.warning(
                f"{self._info.name} has no language {language!s}; it speaks "
                f"{settings.language or 'the language of the text'} instead."
            )

    def _check_voice(self, name: object) -> None:
        info, names = self._info, self._voices
        if info.kind == "voice_design":
            if name is not None:
                raise VoiceError(
                    f"A VoiceDesign model has no named voices (found the voice {name!r}); describe "
                    "one: Settings(instruct='...')."
                )
            return
        if info.kind == "base" and not names:
            raise VoiceError(
                "A Base model speaks with cloned voices: give the service some (voices={'anna': "
                "engine.clone('anna.wav', 'What Anna says in it.')}), or its server."
            )
        known = {_normalized(voice) for voice in names}
        if not isinstance(name, str) or _normalized(name) not in known:
            raise VoiceError(f"There is no voice {name!r}; choose one of: {', '.join(names)}.")

    def _check_instruct(self, instruct: object) -> None:
        if not isinstance(instruct, str | None):
            raise InstructionError(f"instruct is {instruct!r}; it must be a string or None.")
        given = bool(instruct and instruct.strip())
        if given and not self._info.takes_instruct:
            raise InstructionError(
                "This model follows no instruction; 1.7B-CustomVoice and 1.7B-VoiceDesign do. "
                "Leave instruct out."
            )
        if not given and self._info.kind == "voice_design":
            raise InstructionError(
                "A VoiceDesign model needs a description of a voice: Settings(instruct='...')."
            )

    def _check_sampling(self, sampling: object) -> None:
        if not isinstance(sampling, Sampling | None):
            raise SamplingError(f"sampling is {sampling!r}; it must be a Sampling or None.")

    def _check_speed(self, speed: float | None) -> None:
        if speed is not None:
            self._check_speed_in_model(speed)

    def _check_pronunciations(self, pronunciations: Mapping[str, str] | None) -> None:
        if not isinstance(pronunciations, Pronunciations):
            Pronunciations(pronunciations)


def _normalized(name: str) -> str:
    """A name as it is compared with others."""
    return name.strip().lower()


def language_name(language: Language) -> str | None:
    """The model's name of a language in any region; None if the model lacks the language."""
    return LANGUAGE_CODES.get(language.value.split("-")[0].lower())
