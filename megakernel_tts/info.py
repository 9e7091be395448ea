"""Description of a checkpoint, from its config alone."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.demo import DEMO, DEMO_NOTE

# Code of a language without its region (ISO 639) -> the models' name of the language.
LANGUAGE_CODES = {
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


@dataclass(frozen=True)
class ModelInfo:
    """Description of a checkpoint.

    Attributes:
        kind: `base` (clones voices), `custom_voice` (has named voices) or `voice_design`.
        voices: Named voices and the languages of each, its dialect first.
        languages: Values of `language` besides `auto`.
        takes_instruct: Whether the model follows an instruction.
        note: A remark for listeners, if there is one.
        name: The name or folder under which it was loaded.
    """

    kind: str
    voices: Mapping[str, tuple[str, ...]]
    languages: tuple[str, ...]
    takes_instruct: bool
    note: str | None
    name: str


def model_info(config: ModelConfig, model: str | os.PathLike[str]) -> ModelInfo:
    """Describes a model.

    Args:
        config: The checkpoint's config.
        model: The name or folder under which it was loaded.
    """
    languages = config.talker.spoken_languages
    dialects = config.talker.dialects
    voices = {
        name: ((dialects[name],) if name in dialects else ()) + languages
        for name in config.talker.speakers
    }
    name = os.fspath(model)
    note = DEMO_NOTE if name == DEMO else None
    return ModelInfo(config.kind, voices, languages, config.takes_instruct, note, name)
