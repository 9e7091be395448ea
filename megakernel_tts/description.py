"""Describes a model by its name; imported without torch."""

import os

from megakernel_common.checks import check_type
from megakernel_tts.info import ModelInfo, model_info
from megakernel_tts.model import hub
from megakernel_tts.model.config import read_model_config

MODEL_TYPES = (str, os.PathLike)  # of what names a model


def describe(model: str | os.PathLike[str] = "demo") -> ModelInfo:
    """Describes a model without loading its weights.

    Args:
        model: As in `TTS.load`.

    Raises:
        CheckpointError: There is no such model, or its config is broken.
    """
    check_type("model", model, MODEL_TYPES, "demo, a folder or a hub id")
    return model_info(read_model_config(hub.find_checkpoint(model) / "config.json"), model)
