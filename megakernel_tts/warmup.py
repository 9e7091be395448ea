"""The warm-up of a model: requests that take every path of later ones."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megakernel_tts.info import ModelInfo
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.sampling import Sampling
from megakernel_tts.speed import MAX_SPEED, can_scale
from megakernel_tts.voice import Voice

if TYPE_CHECKING:
    from megakernel_tts.loader import LoadedModel
    from megakernel_tts.tts import TTS

_TEXT = "Hello."
# Of a speech: chunks of every size, for which plain torch compiles nothing.
_KERNEL_FRAMES, _PLAIN_FRAMES = 16, 2


def warm_up(tts: "TTS", loaded: "LoadedModel") -> None:
    """Speaks in every kind of voice, both layouts, sampled and greedy, solo and on all slots.

    Args:
        tts: The model.
        loaded: What it has loaded.
    """
    plain_torch = loaded.engine.backend.name == "reference"
    num_frames = _PLAIN_FRAMES if plain_torch else _KERNEL_FRAMES
    sampled = Sampling(seed=0, max_frames=num_frames, guard=False)
    for name in tts.voices:
        tts.say(_TEXT, name, sampling=replace(sampled, max_frames=1))
    examples = voice_examples(loaded.config, tts.info)
    for voice, instruct in examples:
        for sampling in (sampled, replace(sampled, temperature=0.0, predictor_temperature=0.0)):
            for layout in ("full", "streaming"):
                tts.say(_TEXT, voice, "auto", instruct, layout, sampling)
    voice, instruct = examples[0]
    if can_scale():
        tts.say(_TEXT, voice, "auto", instruct, sampling=sampled, speed=MAX_SPEED)
    sessions = [
        tts.open(voice, "auto", instruct, sampling=sampled, text=_TEXT) for _ in range(tts.slots)
    ]
    for session in sessions:
        list(session)


def voice_examples(config: ModelConfig, info: ModelInfo) -> list[tuple[Voice | None, str | None]]:
    """A voice and an instruction for each kind of prompt that a model takes."""
    if info.kind == "base":
        x_vector = np.zeros(config.talker.stack.hidden_size, np.float32)
        codes = np.zeros((2, config.talker.num_groups), np.int64)
        return [(Voice(x_vector), None), (Voice(x_vector, codes, "Hi."), None)]
    examples: list[tuple[Voice | None, str | None]] = []
    if info.kind == "custom_voice":
        examples.append((None, None))
    if info.takes_instruct:
        examples.append((None, "A calm voice."))
    return examples
