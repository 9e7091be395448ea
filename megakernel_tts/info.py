"""What a checkpoint can do, from its config alone."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megakernel_tts.model import hub
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.text.prompt import spoken_languages


@dataclass(frozen=True)
class ModelInfo:
    """What a checkpoint can do, as its `config.json` says.

    Attributes:
        kind: `base` (clones), `custom_voice` (has named voices) or `voice_design`.
        voices: Named voices and the languages that each speaks, its dialect first.
        languages: What `language` may be, beside `auto`.
        takes_instruct: Whether it follows an instruction.
        note: What a listener should know first, if anything.
    """

    kind: str
    voices: Mapping[str, tuple[str, ...]]
    languages: tuple[str, ...]
    takes_instruct: bool
    note: str | None


def model_info(config: ModelConfig, model: str | os.PathLike[str]) -> ModelInfo:
    """What the model with this config can do."""
    languages = spoken_languages(config)
    dialects = config.talker.dialects
    voices = {
        name: ((dialects[name],) if name in dialects else ()) + languages
        for name in config.talker.speakers
    }
    note = hub.DEMO_NOTE if os.fspath(model) == hub.DEMO else None
    return ModelInfo(config.kind, voices, languages, config.takes_instruct, note)
