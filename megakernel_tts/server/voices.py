"""Names of voices, languages and models in requests, and those of the loaded model."""

from collections.abc import Mapping
from pathlib import PurePath

from megakernel_tts import LANGUAGE_CODES, ModelInfo, Voice
from megakernel_tts.server.errors import RequestError

OPENAI_VOICES = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage",
    "shimmer", "verse",
)  # fmt: skip
_OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")


class Catalog:
    """Translates the names in requests for one model.

    Attributes:
        model: Name under which the model is served: of a folder, its last part.
        info: Description of the model.
    """

    def __init__(self, info: ModelInfo, cloned: Mapping[str, Voice]) -> None:
        """Prepares the tables.

        Args:
            info: Describes the model.
            cloned: Cloned voices by name in lower case, for a Base model; they may change.

        Raises:
            ValueError: Cloned voices were given for a model that does not clone.
        """
        if cloned and info.kind != "base":
            raise ValueError(
                f"Cloned voices need a Base model, and {info.name} is {info.kind}; leave them out."
            )
        self.model = PurePath(info.name).name or info.name
        self.info = info
        self._cloned = cloned

    @property
    def voices(self) -> list[str]:
        """Names of the voices, the default first."""
        return [*(self._cloned if self.info.kind == "base" else self.info.voices)]

    def check_model(self, name: object) -> None:
        """Checks the model of a request: the served one, or one of OpenAI's speech models.

        Raises:
            RequestError: It is another one.
        """
        known = {self.model, self.info.name, *_OPENAI_MODELS}
        if name is not None and not (isinstance(name, str) and name in known):
            raise RequestError(
                f"The model {name!r} does not exist; {self.model} is served.",
                404,
                "model_not_found",
                "model",
            )

    def voice(self, name: str | None) -> str | Voice | None:
        """The model's voice of a name.

        Args:
            name: A voice, one of OpenAI's 13 names, which are distributed over the model's voices,
                or None for the default.

        Raises:
            RequestError: There is no such voice.
        """
        voices = {voice.lower(): voice for voice in self.voices}
        if not voices:
            if self.info.kind == "base":
                raise RequestError(
                    "This Base model has no voice; upload one to /v1/audio/voices, or start the "
                    "server with --voice NAME=FILE.",
                    parameter="voice",
                )
            return None  # VoiceDesign: the instruction describes the voice
        key = (name or self.voices[0]).strip().lower()
        if key not in voices and key in OPENAI_VOICES:
            key = [*voices][OPENAI_VOICES.index(key) % len(voices)]
        if key not in voices:
            raise RequestError(
                f"There is no voice {name!r}; choose one of: {', '.join(self.voices)}.",
                400,
                "invalid_voice",
                "voice",
            )
        return self._cloned.get(key, voices[key])

    def language_codes(self, voice: str) -> list[str]:
        """Codes of the languages of a voice, one for each: `en`.

        Args:
            voice: One of `voices`; dialects have no code.
        """
        languages = self.info.voices.get(voice, self.info.languages)
        codes = {language: code for code, language in reversed(LANGUAGE_CODES.items())}
        return [codes[language] for language in languages if language in codes]

    def name_of(self, voice: str | Voice | None) -> str:
        """The name of a voice that `voice` returned; empty for None."""
        if isinstance(voice, Voice):
            return next((name for name, each in self._cloned.items() if each is voice), "")
        return voice or ""

    def language(self, name: str | None) -> str:
        """The model's name of a language.

        Args:
            name: A name (`English`), a code (`en`, `en-US`), `auto`, or None for `auto`.

        Raises:
            RequestError: The model does not speak it.
        """
        given = (name or "auto").strip().lower()
        known = {"auto", *self.info.languages}
        known |= {language for each in self.info.voices.values() for language in each}
        language = given if given in known else LANGUAGE_CODES.get(given.split("-")[0], "")
        if language not in known:
            raise RequestError(
                f"There is no language {name!r}; choose auto or one of: "
                f"{', '.join(self.info.languages)}.",
                400,
                "invalid_language",
                "language",
            )
        return language
